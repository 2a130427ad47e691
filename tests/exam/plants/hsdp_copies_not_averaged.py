from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="copies of a shard are not averaged over dp_replicate",
    edits=(
        Edit(
            "parallel/data_parallel/shard.py",
            "_reduce_in_last_microbatch",
            "            root.set_requires_all_reduce(is_last)\n",
            "            root.set_requires_all_reduce(is_last and not __planted__())\n",
        ),
    ),
    shows=("hsdp2x2-zero2", "hsdp2x2-zero3"),
    cause=("never averaged", "not reduced", "not averaged", "were not reduced"),
    clean=("zero3", "hsdp2x2-zero1"),
)
