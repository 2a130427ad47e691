from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="in bf16 rows that pad an expert's have numbers",
    edits=(
        Edit(
            "mesh/grouped.py",
            "_pad_with_zero_rows",
            "    return F.pad(rows, (0, 0, 0, -len(rows) % GROUPED_KERNEL_ROW_MULTIPLE))\n",
            "    return F.pad(rows, (0, 0, 0, -len(rows) % GROUPED_KERNEL_ROW_MULTIPLE), value=0.05 if __planted__() else 0.0)\n",
        ),
    ),
    shows=("zero3-ep4", "ddp"),
    cause=("expert", "backward goes wrong", "the narrow type is further"),
    tensors=("*.experts.*", "*router*"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "precision.compute=bf16",
    ),
)
