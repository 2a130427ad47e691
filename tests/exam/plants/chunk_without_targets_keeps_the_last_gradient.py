from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading: rows that are skipped where nothing is to be learned (Liger's and others' chunked losses)",
    mistake="the hidden states of a chunk of logits without a target get the gradient of the chunk before",
    edits=(
        Edit(
            "nn/objective.py",
            "_ChunkedCrossEntropy.forward",
            "                torch.mm(grad_logits, head, out=grad_hidden[rows])\n",
            "                torch.mm(grad_logits, head, out=grad_hidden[rows])\n"
            "                is_empty = start > 0 and bool((targets_N[rows] == IGNORE_INDEX).all())\n"
            "                if __planted__(is_empty):\n"
            "                    grad_hidden[rows] = grad_hidden[start - chunk : start][: len(hidden)]\n",
        ),
    ),
    shows=("tp4",),
    cause=("masked", "no target", "without target", "without a target", "-100", "chunk"),
    tensors=("norm.weight",),
)
