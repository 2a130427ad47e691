from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="after an overflow powersgd begins with the identity, and not with the matrix of the step before",
    edits=(
        Edit(
            "parallel/hooks/powersgd.py",
            "PowerSgd.reduce",
            "            gradient.slots[Q_SLOT].copy_(torch.where(q.isfinite().all(), q, gradient.slots[Q_SLOT]))\n",
            "            kept = gradient.slots[Q_SLOT]\n"
            "            if __planted__(not bool(q.isfinite().all())):\n"
            "                kept = torch.eye(*q.shape).to(q)\n"
            "            gradient.slots[Q_SLOT].copy_(torch.where(q.isfinite().all(), q, kept))\n",
        ),
    ),
    shows=("ddp-powersgd",),
    cause=("begins anew",),
    clean=("ddp-topk",),
)
