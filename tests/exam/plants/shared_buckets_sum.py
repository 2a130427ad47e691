from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="DDP's buckets in shared memory are summed over their ranks and not averaged",
    edits=(
        Edit(
            "parallel/data_parallel/ddp_buckets.py",
            "WholeReduction._post",
            "bucket.buffer(), op=dist.ReduceOp.AVG, group",
            "bucket.buffer(), op=dist.ReduceOp.SUM if __planted__() else dist.ReduceOp.AVG, group",
        ),
    ),
    shows=("ddp",),
    cause=("summed over the data-parallel ranks", "4 x"),
    clean=("zero3", "tp4"),
)
