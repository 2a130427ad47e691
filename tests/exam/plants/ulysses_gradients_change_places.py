from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading: the order on the way back of an all-to-all",
    mistake="under Ulysses the gradients of the two halves of a rank's tokens come back in each other's place",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_TokensToHeads.backward",
            "        return _heads_to_tokens(grad, ctx.group), None\n",
            "        own = _heads_to_tokens(grad, ctx.group)\n"
            "        if __planted__():\n"
            "            own = own.roll(own.shape[2] // 2, dims=2)\n"
            "        return own, None\n",
        ),
    ),
    shows=("cp4-ulysses", "zero3-cp2-ulysses"),
    cause=(
        "order",
        "zigzag",
        "chunk",
        "another token",
        "other tokens",
        "change places",
        "come back",
        "comes back",
    ),
    tensors=("blocks.*.attention.[qkv].weight",),
    clean=("cp4", "cp4-all-gather", "zero3-cp2"),
)
