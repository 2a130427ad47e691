from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="biases of busy experts rise",
    edits=(
        Edit(
            "nn/routing.py",
            "Router.move_bias",
            "torch.sign(counts_E.mean() - counts_E)",
            "torch.sign(\n"
            "                (counts_E.mean() - counts_E) * (-1 if __planted__() else 1)\n"
            "            )",
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
