from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="planted before in phalanx's tests",
    mistake="gradients of experts are averaged with those of other experts",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "_reduce_experts",
            "    _reduce_in_buckets(context, parameters, experts.group(), experts.num_holders)\n",
            "    group = context.mesh.data_parallel_group() if __planted__() else experts.group()\n"
            "    _reduce_in_buckets(context, parameters, group, experts.num_holders)\n",
        ),
    ),
    shows=("ddp-ep2",),
    cause=("hold other experts",),
    tensors=("*.moe.experts.*",),
    clean=("ddp-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
