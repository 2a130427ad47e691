from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="in shared memory sums of 16 bits are rounded with each rank",
    edits=(
        Edit(
            "mesh/shared_memory/reduction.py",
            "_reduce_piece_by_torch",
            "    total = values[0].float()\n",
            "    total = values[0].clone() if __planted__() else values[0].float()\n",
        ),
    ),
    shows=("definitions",),
    cause=("so many times one part",),
    tensors=("what ranks*",),
    num_ranks=2,
)
