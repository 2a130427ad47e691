from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="planted before in phalanx's tests",
    mistake="gradients of experts are averaged with those of other experts",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "_average_experts_after_backward",
            "        context, parameters, experts.get_group(), experts.num_ranks_with_same_experts\n",
            "        context,\n"
            "        parameters,\n"
            "        context.mesh.data_parallel_group() if __planted__() else experts.get_group(),\n"
            "        experts.num_ranks_with_same_experts,\n",
        ),
    ),
    shows=("ddp-ep2",),
    cause=("hold other experts",),
    tensors=("*.moe.experts.*",),
    clean=("ddp-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
