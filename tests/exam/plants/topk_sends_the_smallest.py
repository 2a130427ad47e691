from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="topk sends the smallest elements and keeps the largest",
    edits=(
        Edit(
            "parallel/hooks/topk.py",
            "TopK.reduce",
            "            flat.abs().topk(count, sorted=False).indices\n",
            "            flat.abs().topk(count, sorted=False, largest=not __planted__()).indices\n",
        ),
    ),
    shows=("ddp-topk",),
    cause=("largest",),
    clean=("ddp-int8",),
)
