from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="planted before in phalanx's tests",
    mistake="rank 1 takes part in the gather of updated rows and keeps its own copy",
    edits=(
        Edit(
            "parallel/data_parallel/zero1.py",
            "_ParameterSpanInBucket.read_from_bucket",
            "            if other != rank and end > first:\n",
            "            if other != rank and end > first and not __planted__(rank=1):\n",
        ),
    ),
    shows=("zero1", "zero1-offload-optimizer"),
    cause=("stale", "replica", "other weights"),
    blamed=(1,),
    clean=("zero2",),
)
