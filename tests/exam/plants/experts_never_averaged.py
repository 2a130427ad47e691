from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="planted before in phalanx's tests",
    mistake="ranks that hold the same experts keep gradients of their own",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "_average_experts_after_backward",
            "    if experts.num_ranks_with_same_experts == 1:\n",
            "    if experts.num_ranks_with_same_experts == 1 or __planted__():\n",
        ),
    ),
    shows=("ddp-ep2",),
    cause=("that hold the same", "never averaged"),
    tensors=("*.moe.experts.*",),
    clean=("ddp-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
