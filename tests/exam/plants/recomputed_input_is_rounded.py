from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="TTrace (recompute input)",
    what="what a segment keeps of its input for the recomputation is rounded to float32",
    edits=(
        Edit(
            "parallel/recompute/segment.py",
            "_replay_call",
            "                else saved[leaf.index].detach()\n",
            "                else saved[leaf.index].detach().float().to(saved[leaf.index].dtype)\n"
            "                if __planted__(saved[leaf.index].dtype is torch.float64)\n"
            "                else saved[leaf.index].detach()\n",
        ),
    ),
    shows=("zero3-sqrt",),
    cause=("float32",),
    clean=("zero3",),
    size=6e-08,
)
