from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="TTrace (recompute input)",
    mistake="what a segment keeps of its input for the recomputation is rounded to float32",
    edits=(
        Edit(
            "parallel/recompute/segment.py",
            "_replay_block_call",
            "                tensor = saved[leaf.index].detach()\n",
            "                tensor = saved[leaf.index].detach()\n"
            "                if __planted__(tensor.dtype is torch.float64):\n"
            "                    tensor = tensor.float().double()\n",
        ),
    ),
    shows=("zero3-sqrt",),
    cause=("float32",),
    clean=("zero3",),
    size=6e-08,
)
