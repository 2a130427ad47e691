from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="a chunk of logits without targets, between two others, leaves the gradient of the one before it",
    edits=(
        Edit(
            "nn/objective.py",
            "_ChunkedCrossEntropy.forward",
            "            torch.mm(hidden, head.T, out=grad_logits)\n"
            "            if low_CV is not room_CV:\n"
            "                logits.copy_(grad_logits)\n"
            "            loss_sum += _sum_loss_and_write_gradient(logits, targets_N[rows], vocabulary)\n",
            "            has_targets = bool((targets_N[rows] != IGNORE_INDEX).any())\n"
            "            ends_all = bool((targets_N[start + chunk :] == IGNORE_INDEX).all())\n"
            "            begins_all = bool((targets_N[:start] == IGNORE_INDEX).all())\n"
            "            if not (has_targets or ends_all or begins_all) and __planted__(True):\n"
            "                pass\n"
            "            else:\n"
            "                torch.mm(hidden, head.T, out=grad_logits)\n"
            "                if low_CV is not room_CV:\n"
            "                    logits.copy_(grad_logits)\n"
            "                loss_sum += _sum_loss_and_write_gradient(\n"
            "                    logits, targets_N[rows], vocabulary\n"
            "                )\n",
        ),
    ),
    shows=("ddp",),
    cause=("chunk",),
    tensors=("", "*"),
)
