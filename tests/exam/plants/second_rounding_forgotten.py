from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="planted before in phalanx's tests",
    mistake="the rank that adds a part up keeps nothing of what its own rounding loses",
    edits=(
        Edit(
            "parallel/hooks/int8.py",
            "Int8.reduce",
            "            k[wire.rank] += wire.num_ranks * (mean - _dequantise_int8_blocks(*final, mean.dtype)[0])\n",
            "            lost = wire.num_ranks * (mean - _dequantise_int8_blocks(*final, mean.dtype)[0])\n"
            "            k[wire.rank] += lost * (0 if __planted__() else 1)\n",
        ),
    ),
    shows=("ddp-int8",),
    cause=("keep", "rounding", "lost"),
    clean=("ddp-topk",),
)
