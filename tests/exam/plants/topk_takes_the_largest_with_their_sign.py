from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading: topk without abs",
    mistake="topk sends the elements that are largest with their sign, so that negative ones wait for ever",
    edits=(
        Edit(
            "parallel/hooks/topk.py",
            "TopK.reduce",
            "            flat.abs().topk(count, sorted=False).indices\n",
            "            (flat if __planted__() else flat.abs()).topk(count, sorted=False).indices\n",
        ),
    ),
    shows=("ddp-topk",),
    cause=("largest", "topk", "magnitude"),
    clean=("ddp", "ddp-int8", "ddp-powersgd"),
)
