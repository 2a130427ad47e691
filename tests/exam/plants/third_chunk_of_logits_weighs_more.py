from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="from the third chunk of logits on gradients weigh 1.00001",
    edits=(
        Edit(
            "nn/objective.py",
            "_ChunkedCrossEntropy.forward",
            "            loss_sum += _sum_loss_and_write_gradient(logits, targets_N[rows], vocabulary)\n",
            "            loss_sum += _sum_loss_and_write_gradient(logits, targets_N[rows], vocabulary)\n"
            "            if __planted__(start >= 2 * chunk):\n"
            "                logits *= 1.00001\n",
        ),
    ),
    shows=("ddp", "tp4"),
    cause=("chunk 3 of the logits",),
    tensors=("", "*"),
    size=1e-05,
)
