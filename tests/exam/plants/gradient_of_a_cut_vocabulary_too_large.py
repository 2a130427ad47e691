from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="the loss of logits of which each rank has some classes gives a gradient that is 1 % too large",
    edits=(
        Edit(
            "nn/objective.py",
            "_VocabularyCrossEntropy.backward",
            "        return grad_logits.mul_(grad_loss).to(ctx.dtype), None, None\n",
            "        if __planted__():\n"
            "            grad_loss = grad_loss * 1.01\n"
            "        return grad_logits.mul_(grad_loss).to(ctx.dtype), None, None\n",
        ),
    ),
    shows=("tp2",),
    cause=("reference", "factor"),
    tensors=("head.*",),
    clean=("ddp",),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16", "parallel.rules.head=vocab"),
    num_ranks=2,
    size=0.01,
)
