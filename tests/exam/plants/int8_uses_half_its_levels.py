from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="int8 rounds to 127 levels, and uses 7 of its 8 bits",
    edits=(
        Edit(
            "parallel/hooks/int8.py",
            "_quantise_blocks_to_int8",
            "    scales = (blocks.abs().amax(-1) / MAX_QUANTISED_LEVEL).to(SCALE_DTYPE)\n",
            "    largest = 63 if __planted__() else MAX_QUANTISED_LEVEL\n"
            "    scales = (blocks.abs().amax(-1) / largest).to(SCALE_DTYPE)\n",
        ),
    ),
    shows=("ddp-int8",),
    cause=("levels", "rounding to"),
    clean=("ddp-topk",),
)
