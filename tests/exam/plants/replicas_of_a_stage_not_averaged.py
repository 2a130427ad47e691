from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="planted before in phalanx's tests",
    mistake="ranks that hold the same stage never average",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "_average_in_buckets_after_backward",
            "            average_gradients_in_one_collective(bucket, group, context.phases)\n",
            "            if not __planted__():\n"
            "                average_gradients_in_one_collective(bucket, group, context.phases)\n",
        ),
    ),
    shows=("pp2-ddp-1f1b", "pp2-ddp-zb-v"),
    cause=("never averaged",),
    clean=("pp2-zero3-1f1b",),
)
