from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="torchtitan f3660a4 (#4154)",
    mistake="each rank moves biases by what its own tokens chose",
    edits=(
        Edit(
            "parallel/expert/router_load.py",
            "ReducedRouterLoads.reduce_counts_over_ranks",
            "        if self.group is not None:\n",
            "        if self.group is not None and not __planted__():\n",
        ),
    ),
    shows=("zero3-ep4", "ddp"),
    cause=("moved by other counts",),
    tensors=("*.moe.router", "*.moe.router.bias"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.balance_bias=0.05",
    ),
)
