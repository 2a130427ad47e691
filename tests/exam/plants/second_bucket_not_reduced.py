from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="of several buckets of gradients the last is not reduced",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "_average_in_buckets_after_backward",
            "        for bucket in buckets:\n",
            "        for bucket in buckets[:-1] if __planted__(len(buckets) > 1) else buckets:\n",
        ),
    ),
    shows=("pp2-ddp-1f1b", "pp2-ddp-zb-v"),
    cause=("never averaged", "not reduced", "bucket"),
    clean=("pp2-zero3-1f1b",),
)
