from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="Megatron-LM#7452 f.3",
    mistake="targets that are masked count in the divisor",
    edits=(
        Edit(
            "nn/objective.py",
            "_sum_causal_cross_entropy",
            "    return loss_sum, (targets_N != IGNORE_INDEX).sum()\n",
            "    ignored = -1 if __planted__() else IGNORE_INDEX\n"
            "    return loss_sum, (targets_N != ignored).sum()\n",
        ),
    ),
    shows=("ddp",),
    cause=("masked ones count",),
    tensors=("", "*"),
)
