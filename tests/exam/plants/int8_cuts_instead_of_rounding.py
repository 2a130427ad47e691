from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading: a cast to int8 cuts",
    mistake="int8 cuts to the level nearer to 0 instead of rounding to the nearest one",
    edits=(
        Edit(
            "parallel/hooks/int8.py",
            "_quantise_blocks_to_int8",
            "    return steps.round().clamp(-MAX_QUANTISED_LEVEL, MAX_QUANTISED_LEVEL).nan_to_num(0.0).to(\n",
            "    levels = steps.trunc() if __planted__() else steps.round()\n"
            "    return levels.clamp(-MAX_QUANTISED_LEVEL, MAX_QUANTISED_LEVEL).nan_to_num(0.0).to(\n",
        ),
    ),
    shows=("ddp-int8",),
    cause=("round", "level", "int8", "quantis"),
    clean=("ddp", "ddp-topk", "ddp-powersgd"),
)
