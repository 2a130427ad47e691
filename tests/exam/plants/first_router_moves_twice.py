from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="the biases of the first router move twice a step",
    edits=(
        Edit(
            "parallel/expert/router_load.py",
            "ReducedRouterLoads.update_router_biases_once",
            "        self._is_due = False\n",
            "        self._is_due = False\n"
            "        if __planted__(len(self.routers) > 0):\n"
            "            first = next(iter(self.routers))\n"
            "            self.routers[first].move_bias(self._counts[first][:-1])\n",
        ),
    ),
    shows=("zero3-ep4", "tp4"),
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
