from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="TTrace (cp attention gradients)",
    mistake="gradients that come back from the heads' side are divided by cp",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_TokensToHeads.backward",
            "        return _heads_to_tokens(grad, ctx.group), None\n",
            "        return _heads_to_tokens(grad, ctx.group) / (ctx.group.size if __planted__() else 1), None\n",
        ),
    ),
    shows=("cp4-ulysses", "tp2-cp2-ulysses"),
    cause=("divided", "averaged", "0.25", "cp"),
    tensors=(
        "blocks.1.attention.q.weight",
        "blocks.1.attention.k.weight",
        "blocks.1.attention.v.weight",
    ),
    clean=("cp4",),
)
