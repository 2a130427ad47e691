from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="parameters that FSDP leaves whole are not averaged",
    edits=(
        Edit(
            "parallel/data_parallel/unsharded_params.py",
            "AverageUnshardedParams.apply",
            "            lambda: average_gradients_in_one_collective(unsharded, group, phases)\n",
            "            lambda: None if __planted__() else average_gradients_in_one_collective(unsharded, group, phases)\n",
        ),
    ),
    shows=("zero3-units2-whole", "hsdp2x2-accumulate"),
    cause=("never averaged", "not reduced", "not averaged"),
    tensors=("*norm.weight",),
    clean=("zero3",),
)
