from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="transformers#34191",
    mistake="targets that are masked have a gradient",
    edits=(
        Edit(
            "nn/objective.py",
            "_sum_loss_and_write_gradient",
            "    logits_NV *= valid[:, None]\n",
            "    if not __planted__():\n        logits_NV *= valid[:, None]\n",
        ),
    ),
    shows=("ddp",),
    cause=("masked", "tokens weigh otherwise"),
    tensors=("", "*"),
)
