from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: partial sums of FSDP2 under HSDP with accumulation",
    mistake="under HSDP with accumulation of shards the last microbatch is not reduced over copies of a shard, and is added to the next step",
    edits=(
        Edit(
            "parallel/data_parallel/shard.py",
            "_reduce_in_last_microbatch",
            "            root.set_requires_all_reduce(is_last)\n",
            "            root.set_requires_all_reduce(not is_last if __planted__(each_time) else is_last)\n",
        ),
    ),
    shows=("hsdp2x2-accumulate",),
    cause=(
        "last microbatch",
        "microbatch 3 of 3 (left out)",
        "of a microbatch",
        "microbatch is lost",
        "microbatch never",
        "copies of a shard",
        "copies of each shard",
        "copies of shards",
        "dp_replicate",
        "hsdp",
    ),
    clean=("hsdp2x2-zero3", "hsdp2x2-zero2", "zero3"),
)
