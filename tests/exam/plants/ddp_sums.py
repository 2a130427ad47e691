from exam.plant import DEFAULT_JOB, Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="planted before in phalanx's tests",
    mistake="DDP sums gradients over its ranks instead of averaging them",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "DpReplicate.apply",
            "        reduction = attach_gradient_reduction_to_ddp(context, ddp)\n",
            "        reduction = attach_gradient_reduction_to_ddp(context, ddp)\n"
            "        if __planted__():\n"
            "            ddp.register_comm_hook(\n"
            "                None,\n"
            "                lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True)\n"
            "                .get_future()\n"
            "                .then(lambda future: future.value()[0]),\n"
            "            )\n",
        ),
    ),
    shows=("ddp",),
    cause=("summed over the data-parallel ranks", "4 x"),
    clean=("zero3", "tp4"),
    job=(*DEFAULT_JOB, "parallel.collectives=gloo"),
)
