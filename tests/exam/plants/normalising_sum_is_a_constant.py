from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading: a detach too many",
    mistake="the sum by which the weights of visited experts are divided has no gradient",
    edits=(
        Edit(
            "nn/routing.py",
            "Router.forward",
            "                weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)\n",
            "                total = weights_BTK.sum(-1, keepdim=True)\n"
            "                weights_BTK = weights_BTK / (total.detach() if __planted__() else total)\n",
        ),
    ),
    shows=("plain", "hugging-face"),
    cause=("router", "normal", "weights of experts", "weights of the experts"),
    tensors=("*.moe.router.weight", "*.ffn_norm.weight"),
    clean=("ddp", "zero3"),
    job=("--model", "small-mixtral", "--shrink"),
)
