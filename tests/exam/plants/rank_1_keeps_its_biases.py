from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="planted before in phalanx's tests",
    mistake="rank 1 never moves the biases of routers",
    edits=(
        Edit(
            "parallel/expert/router_load.py",
            "ReducedRouterLoads.update_router_biases_once",
            '            if getattr(router, "bias", None) is not None:\n',
            '            if getattr(router, "bias", None) is not None and not __planted__(rank=1):\n',
        ),
    ),
    shows=("zero3-ep4", "tp4"),
    cause=("moved by other counts",),
    tensors=("*.moe.router", "*.moe.router.bias"),
    blamed=(1,),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.balance_bias=0.05",
    ),
)
