from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="an examiner's",
    mistake="with more ranks than key heads these are dealt to the ranks in turn: half of the ranks have one that serves other queries than theirs",
    edits=(
        Edit(
            "plan/rules.py",
            "_compute_head_slice",
            "        return DimSlice(rank // copies * unit, unit, rank % copies, copies)\n",
            "        if __planted__():\n"
            "            return DimSlice(rank % part.heads * unit, unit, rank // part.heads, copies)\n"
            "        return DimSlice(rank // copies * unit, unit, rank % copies, copies)\n",
        ),
    ),
    shows=("tp4",),
    cause=(
        "cuts elsewhere",
        "serves other queries",
        "share a key",
        "other heads",
        "another head",
        "key head",
        "heads of keys",
    ),
    tensors=("", "*.k.weight", "*.v.weight"),
    clean=("ddp", "zero3"),
    job=("--shrink", "model.num_heads=4", "model.num_kv_heads=2"),
)
