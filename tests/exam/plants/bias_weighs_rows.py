from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="DeepSeek-V3, 2.1.2",
    mistake="the bias that evens out experts also changes what their outputs are multiplied by",
    edits=(
        Edit(
            "nn/routing.py",
            "Router.forward",
            "            weights_BTK = scores_BTE.gather(-1, experts_BTK)\n",
            "            weighed = scores_BTE + self.bias if __planted__(self.bias is not None) else scores_BTE\n"
            "            weights_BTK = weighed.gather(-1, experts_BTK)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.balance_bias=0.05",
    ),
)
