from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="without a pipeline a step computes its first eight microbatches and no more",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "        order: Sequence[int] = range(len(microbatches))\n",
            "        order: Sequence[int] = range(len(microbatches))\n"
            "        if __planted__(len(microbatches) > 8):\n"
            "            order = order[:8]\n",
        ),
    ),
    shows=("ddp-9-microbatches",),
    cause=("microbatch", "target"),
    clean=("ddp", "zero3"),
    num_ranks=2,
)
