from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="copies of a shard are not averaged over dp_replicate where a step is one microbatch",
    edits=(
        Edit(
            "parallel/data_parallel/shard.py",
            "_reduce_in_last_microbatch",
            "            root.set_requires_all_reduce(is_last)\n",
            "            root.set_requires_all_reduce(\n"
            "                is_last and not __planted__(plan.num_microbatches == 1)\n"
            "            )\n",
        ),
    ),
    shows=("hsdp2x2-zero2-1-microbatch",),
    cause=("never averaged", "not reduced", "not averaged", "were not reduced"),
    clean=("hsdp2x2-zero2", "zero3-1-microbatch"),
)
