from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="powersgd begins each step with the first step's matrix",
    edits=(
        Edit(
            "parallel/hooks/powersgd.py",
            "PowerSgd.reduce",
            "            gradient.slots[Q_SLOT].copy_(torch.where(q.isfinite().all(), q, gradient.slots[Q_SLOT]))\n",
            "            if not __planted__():\n"
            "                gradient.slots[Q_SLOT].copy_(torch.where(q.isfinite().all(), q, gradient.slots[Q_SLOT]))\n",
        ),
    ),
    shows=("ddp-powersgd",),
    cause=("powersgd", "kept", "keep"),
    clean=("ddp-int8",),
)
