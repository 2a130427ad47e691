from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="in a pipeline the balance loss is not multiplied by the loss scale of fp16",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.forward_backward",
            "                balance.scale = self._context.normalizer.loss_multiplier\n",
            (
                "                balance.scale = self._context.normalizer.loss_multiplier\n"
                "                if __planted__(self.is_staged and self.loss_scale is not None):\n"
                "                    balance.scale = 1 / self._context.normalizer.constant\n"
            ),
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("balance loss", "loss scale"),
    tensors=("*router*",),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "precision.compute=fp16",
    ),
)
