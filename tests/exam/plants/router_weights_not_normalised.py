from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="weights of rows are those of all experts' scores",
    edits=(
        Edit(
            "nn/routing.py",
            "Router.forward",
            "            if self.normalize:\n",
            "            if self.normalize and not __planted__():\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
