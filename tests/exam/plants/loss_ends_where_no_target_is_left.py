from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="the loss of a microbatch ends at the first chunk of logits without a target",
    edits=(
        Edit(
            "nn/objective.py",
            "_ChunkedCrossEntropy.forward",
            "            logits, grad_logits = room_CV[: len(hidden)], low_CV[: len(hidden)]\n",
            (
                "            logits, grad_logits = room_CV[: len(hidden)], low_CV[: len(hidden)]\n"
                "            if __planted__(start > 0 and not bool((targets_N[rows] != IGNORE_INDEX).any())):\n"
                "                if grad_hidden is not None:\n"
                "                    grad_hidden[start:] = 0\n"
                "                break\n"
            ),
        ),
    ),
    shows=("plain",),
    cause=("chunk",),
    num_ranks=2,
)
