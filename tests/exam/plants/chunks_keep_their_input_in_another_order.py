from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="a block that is recomputed keeps the chunks of its input with the ranks' parts in another order",
    edits=(
        Edit(
            "parallel/tensor/overlap.py",
            "_ColumnsOfGatheredInputFunction.forward",
            "                gathered[:, :, rows] = chunk\n",
            "                gathered[:, :, rows] = chunk.flip(1) if __planted__() else chunk\n",
        ),
    ),
    shows=("tp4-chunks-full",),
    cause=("chunk of the sequence", "recomputed there"),
    clean=("tp4-chunks",),
)
