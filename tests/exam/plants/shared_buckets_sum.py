from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="DDP's buckets in shared memory are summed over their ranks and not averaged",
    edits=(
        Edit(
            "parallel/data_parallel/shared_buckets.py",
            "SharedBucketReduction._post",
            "        work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=self._group, async_op=True)\n",
            "        operation = dist.ReduceOp.SUM if __planted__() else dist.ReduceOp.AVG\n"
            "        work = dist.all_reduce(buffer, op=operation, group=self._group, async_op=True)\n",
        ),
    ),
    shows=("ddp",),
    cause=("summed over the data-parallel ranks", "4 x"),
    clean=("zero3", "tp4"),
)
