from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="ranks of cp that have no data-parallel rank beside them never average their gradients",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "DpReplicate.is_needed",
            "            plan.layout.gradient_reduction_layout.data_parallel_size > 1\n",
            "            (plan.layout if __planted__() else plan.layout.gradient_reduction_layout).data_parallel_size > 1\n",
        ),
    ),
    shows=("cp4", "cp4-ulysses"),
    cause=(
        "never averaged",
        "not reduced",
        "not averaged",
        "were not reduced",
        "ranks of cp",
        "over cp",
        "own tokens",
        "part of the sequence",
    ),
    clean=("ddp", "ddp-cp2", "zero3-cp2"),
)
