from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="Megatron-LM's MoEAuxLossAutoScaler, whose scale is set once (own reading)",
    mistake="the balance loss of experts goes on with the loss scale of the first step when that has changed",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.forward_backward",
            "                balance.scale = self._context.normalizer.loss_multiplier\n",
            "                multiplier = self._context.normalizer.loss_multiplier\n                if not __planted__(isinstance(balance.scale, float) and balance.scale != multiplier):\n                    balance.scale = multiplier\n",
        ),
        Edit(
            "nn/routing.py",
            "_RecordLossGradient.backward",
            "        ctx.balance.scale = grad\n",
            "        if not __planted__(isinstance(ctx.balance.scale, float)):\n            ctx.balance.scale = grad\n",
        ),
    ),
    shows=("trainer-loss-scale",),
    clean=("zero3",),
    tensors=("", "*router*"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "precision.compute=fp16",
    ),
    cause=("balance loss of experts is weighed otherwise",),
)
