from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="Megatron-LM 76d26e2 (#5273)",
    mistake="from the second chunk of logits on the head has no gradient",
    edits=(
        Edit(
            "nn/objective.py",
            "_ChunkedCrossEntropy.forward",
            "                _add_chunk_to_head_gradient(grad_head, grad_logits, hidden, room_CV)\n",
            "                if not __planted__(start > 0):\n"
            "                    _add_chunk_to_head_gradient(grad_head, grad_logits, hidden, room_CV)\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("head", "embed.weight", "chunk"),
    tensors=("head.weight", "embed.weight"),
)
