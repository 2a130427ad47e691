from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="of a step's microbatches the last one alone counts in the loads of experts",
    edits=(
        Edit(
            "nn/routing.py",
            "RouterLoad.add",
            "        if self.counts_E is not None and self.dropped is not None:\n",
            "        if self.counts_E is not None and self.dropped is not None and not __planted__():\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("microbatch", "count", "load"),
    tensors=("*router*",),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.balance_bias=0.05",
    ),
)
