from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="of more than two ranks the sum is made where the result is to be, which is an operand that is still needed from the third rank on",
    edits=(
        Edit(
            "mesh/shared_memory/reduction.py",
            "_reduce_piece_by_numpy",
            "    if len(values) > 2:\n",
            "    if len(values) > 2 and not __planted__():\n",
        ),
    ),
    shows=("ddp", "zero1", "tp4-whole-sequence"),
    cause=(
        "not reduced",
        "reduc",
        "is missing in its loss",
        "counts twice",
        "counted twice",
        "rank 2",
        "rank 3",
    ),
    clean=("zero3",),
)
