from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="an examiner's",
    mistake="each rank brings gradients into the range of fp16 by a power of two of its own, and ranks add up what is scaled otherwise",
    edits=(
        Edit(
            "parallel/hooks/fp16.py",
            "Fp16GradientCompression.reduce",
            "        wire.max_over_ranks(limits)\n",
            "        if not __planted__():\n            wire.max_over_ranks(limits)\n",
        ),
    ),
    shows=("ddp-fp16",),
    cause=(
        "another scale",
        "other scales",
        "scaled otherwise",
        "scales",
        "agree on",
        "largest",
        "maximum over",
    ),
    clean=("ddp-bf16",),
)
