from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="Megatron-LM e3fe550 (#5798), e86c262 (#5696)",
    mistake="the balance loss depends on how many sequences a microbatch has",
    edits=(
        Edit(
            "nn/routing.py",
            "Router._add_balance_loss_gradient",
            "            length = self.sequences.length(chosen_BTE.shape[1])\n",
            "            length = self.sequences.length(chosen_BTE.shape[1]) * (chosen_BTE.shape[0] if __planted__() else 1)\n",
        ),
    ),
    shows=("zero3-ep4", "ddp"),
    cause=("balance loss", "microbatch"),
    tensors=("*.moe.router.weight",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
