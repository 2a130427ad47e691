from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="of tensors longer than a chunk the ranks of a host do not exchange the last, shorter chunk",
    edits=(
        Edit(
            "mesh/shared_memory/calls.py",
            "_list_chunks",
            "    starts = range(0, num_bytes, length) or range(1)\n",
            "    starts = range(0, num_bytes, length) or range(1)\n"
            "    if __planted__(len(starts) > 1 and num_bytes % length):\n"
            "        starts = starts[:-1]\n",
        ),
    ),
    shows=("ddp", "zero1", "zero2", "zero3", "tp4"),
    cause=("never averaged", "not reduced", "part"),
)
