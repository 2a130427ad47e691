from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="powersgd keeps its matrix with one row turned round: what is sent is right in this step, and the next begins elsewhere",
    edits=(
        Edit(
            "parallel/hooks/powersgd.py",
            "PowerSgd.reduce",
            "            gradient.slots[Q_SLOT].copy_(torch.where(q.isfinite().all(), q, gradient.slots[Q_SLOT]))\n",
            "            if __planted__():\n"
            "                q[0] = -q[0]\n"
            "            gradient.slots[Q_SLOT].copy_(torch.where(q.isfinite().all(), q, gradient.slots[Q_SLOT]))\n",
        ),
    ),
    shows=("ddp-powersgd",),
    cause=("powersgd", "kept", "keep"),
    clean=("ddp-int8",),
)
