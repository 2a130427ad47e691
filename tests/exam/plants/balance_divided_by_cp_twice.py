from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="Megatron-LM f6e0d42 (#2237)",
    mistake="under cp the balance loss is divided by cp once too often",
    edits=(
        Edit(
            "nn/routing.py",
            "Router._add_balance_loss_gradient",
            "            counts = self.sequences.total(counts_BE).to(scores_BTE.dtype)\n",
            "            counts = self.sequences.total(counts_BE).to(scores_BTE.dtype)\n"
            '            if __planted__(hasattr(self.sequences, "group")):\n'
            "                counts = counts / self.sequences.group.size\n",
        ),
    ),
    shows=("cp4-ep4", "cp4"),
    cause=("balance loss",),
    tensors=("*.moe.router.weight",),
    clean=("zero3-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
