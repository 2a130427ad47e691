from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="where microbatches add up in DDP's buckets norms and biases begin with their gradient of the step before",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "BucketAccumulator.restore_gradients",
            "                parameter.grad = view.zero_()\n",
            "                parameter.grad = view if __planted__(view.ndim < 2) else view.zero_()\n",
        ),
    ),
    shows=("ddp",),
    cause=("left in gradients", "step before", "cleared"),
    tensors=("*norm*",),
    clean=("zero3", "ddp-1-microbatch"),
)
