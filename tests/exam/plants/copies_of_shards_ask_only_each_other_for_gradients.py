from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="under HSDP a gradient that none of a copy's ranks has is taken for one that nobody has, though other copies do",
    edits=(
        Edit(
            "parallel/missing_gradients.py",
            "MissingGradients.remove_those_that_all_ranks_lack",
            "                if getattr(layout, axis) > 1:\n",
            '                if getattr(layout, axis) > 1 and not __planted__(axis == "dp_replicate"):\n',
        ),
    ),
    shows=("hsdp2x2-zero3", "hsdp2x2-zero2"),
    cause=(
        "replica",
        "no gradient",
        "not move",
        "never moves",
        "left out",
        "nobody updates",
        "zeros",
    ),
    tensors=("rare.*",),
    clean=("zero3",),
    job=("--model", "exam_models:WithRareLayer", "data.seq_len=16"),
)
