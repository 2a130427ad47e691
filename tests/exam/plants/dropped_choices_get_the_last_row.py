from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading: an index that is clamped and not masked",
    mistake="a choice that an expert had no room for adds the last row that was computed, of whatever token",
    edits=(
        Edit(
            "nn/experts.py",
            "_sum_rows_by_token",
            "            part_ND = part_ND.masked_fill_((row_N >= num_rows)[:, None], 0)\n",
            "            if not __planted__(bool((row_N >= num_rows).any())):\n                part_ND = part_ND.masked_fill_((row_N >= num_rows)[:, None], 0)\n",
        ),
    ),
    shows=("plain",),
    tensors=("", "*"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.expert_capacity=0.7",
    ),
    cause=("dropped", "capacity", "for want of room"),
)
