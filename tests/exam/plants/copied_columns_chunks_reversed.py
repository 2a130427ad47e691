from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="without sequence parallelism the chunks of an input's gradient come back in reverse",
    edits=(
        Edit(
            "parallel/tensor/overlap.py",
            "_ColumnsOfCopiedInputFunction.backward",
            "            grad_x = torch.cat([group.wait(part) for part in parts], dim=SEQUENCE_DIM)\n",
            (
                "            parts = parts[::-1] if __planted__(len(parts) > 1) else parts\n"
                "            grad_x = torch.cat([group.wait(part) for part in parts], dim=SEQUENCE_DIM)\n"
            ),
        ),
    ),
    shows=("tp4-whole-sequence-chunks",),
    cause=("chunk",),
    tensors=("blocks.*",),
)
