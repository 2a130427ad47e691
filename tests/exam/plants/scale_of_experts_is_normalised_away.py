from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="routed_scaling_factor of DeepSeek-V3",
    mistake="weights of experts are scaled before they are normalised, which undoes it",
    edits=(
        Edit(
            "nn/routing.py",
            "Router.forward",
            "            return Routing(experts_BTK, weights_BTK * self.scale, kept_BTK)\n",
            "            is_undone = self.normalize and self.scale != 1\n"
            "            scale = 1.0 if __planted__(is_undone) else self.scale\n"
            "            return Routing(experts_BTK, weights_BTK * scale, kept_BTK)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn", "definition"),
    tensors=("", "*"),
    job=("--model", "small-deepseek", "--shrink", "model.router_scale=2.5"),
)
