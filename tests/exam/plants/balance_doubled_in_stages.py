from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="Megatron-LM ec97c85 (#4070)",
    mistake="in a pipeline the balance loss weighs twice as much",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.forward_backward",
            "            balance.scale = self._context.normalizer.loss_multiplier\n",
            "            balance.scale = self._context.normalizer.loss_multiplier * (2 if __planted__() else 1)\n",
        ),
    ),
    shows=("pp2-zero3-ep2-1f1b", "pp4-1f1b"),
    cause=("balance loss",),
    tensors=("*.moe.router.weight",),
    clean=("zero3-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
