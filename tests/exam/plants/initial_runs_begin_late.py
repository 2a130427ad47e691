from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="of initial weights that are cut along a second dimension each run begins one element late",
    edits=(
        Edit(
            "nn/init.py",
            "_fill_with_normals",
            "            start = first + sum(map(operator.mul, index, strides))\n",
            "            start = first + sum(map(operator.mul, index, strides)) + (1 if __planted__() else 0)\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("initial weights depend",),
    clean=("zero3",),
)
