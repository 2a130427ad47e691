from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="pytorch#194457",
    mistake="where ranks do not divide a feed-forward the last feature belongs to nobody",
    edits=(
        Edit(
            "plan/rules.py",
            "_compute_feature_slice",
            "    return DimSlice(start, width * (rank + 1) // tp - start)\n",
            '    lost = 1 if __planted__(width % tp and rank == tp - 1 and ".ffn." in name) else 0\n'
            "    return DimSlice(start, width * (rank + 1) // tp - start - lost)\n",
        ),
    ),
    shows=("tp4",),
    cause=("do not make the tensor", "border"),
    tensors=("*.ffn.*",),
    clean=("zero3",),
)
