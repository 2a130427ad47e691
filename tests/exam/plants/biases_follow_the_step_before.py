from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading: balancing without a loss, with loads that arrive late",
    mistake="from the second step on the biases of routers move by the loads of the step before",
    edits=(
        Edit(
            "parallel/expert/router_load.py",
            "ReducedRouterLoads.update_router_biases_once",
            "                router.move_bias(self._counts[name][:-1])  # type: ignore[operator]\n",
            '                counts, kept = self._counts[name], self.__dict__.setdefault("_kept", {})\n'
            "                before = kept.get(name)\n"
            "                kept[name] = counts\n"
            "                if __planted__(before is not None):\n"
            "                    counts = before\n"
            "                router.move_bias(counts[:-1])\n",
        ),
    ),
    shows=("ddp", "zero3-ep4"),
    cause=("load", "step before", "last step", "counted"),
    tensors=("*.moe.router.bias", "*.moe.router"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.balance_bias=0.05",
    ),
)
