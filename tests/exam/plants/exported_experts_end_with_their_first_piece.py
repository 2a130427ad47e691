from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="of an expert's matrix that ranks have cut an export has the first piece alone",
    edits=(
        Edit(
            "checkpoint/reading/full_tensors.py",
            "FullTensorReader._load_box_of_tensor",
            "            bits[build_box_slices(in_box, length)] = block\n",
            (
                "            bits[build_box_slices(in_box, length)] = block\n"
                "            if __planted__(len(size) == 3 and size[0] == 1 and length != size):\n"
                "                break\n"
            ),
        ),
    ),
    shows=("trainer-tp2-zero3", "trainer-zero3-ep2"),
    cause=("export",),
    tensors=("*experts*", ""),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
