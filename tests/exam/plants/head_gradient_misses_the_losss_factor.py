from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="Liger-Kernel's fused linear cross-entropy, which takes grad_output for 1",
    mistake="the gradient of the head is not multiplied by what the backward of the loss begins with",
    edits=(
        Edit(
            "nn/objective.py",
            "_ChunkedCrossEntropy.backward",
            "        grad_head.mul_(grad_loss)\n",
            "        if not __planted__(bool(grad_loss != 1)):\n            grad_head.mul_(grad_loss)\n",
        ),
    ),
    shows=("ddp",),
    clean=("plain",),
    tensors=("embed.weight",),
    cause=("what the backward of the loss begins with",),
)
