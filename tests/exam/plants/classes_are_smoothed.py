from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading: label smoothing that is on by default (timm's recipes)",
    mistake="the loss of classes is smoothed by 0.0001",
    edits=(
        Edit(
            "nn/objective.py",
            "classification_cross_entropy",
            '    loss_sum = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")\n',
            "    smoothing = 1e-4 if __planted__() else 0.0\n"
            "    loss_sum = F.cross_entropy(\n"
            "        logits,\n"
            "        labels,\n"
            "        ignore_index=IGNORE_INDEX,\n"
            '        reduction="sum",\n'
            "        label_smoothing=smoothing,\n"
            "    )\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=(
        "objective",
        "smooth",
        "cross-entropy",
        "cross entropy",
        "loss itself",
        "loss is another",
        "another loss",
    ),
    tensors=("", "head.*"),
    size=0.0001,
    job=("--model", "small-vit", "--shrink"),
)
