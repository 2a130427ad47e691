from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="gradients of keys that arrive in the third step of the ring are dropped",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_RingExchange.compute_own_key_value_gradients",
            "                block_grad += arriving()\n",
            "                from_others = arriving()\n"
            "                block_grad += from_others * (0 if __planted__(step == 2) else 1)\n",
        ),
    ),
    shows=("cp4",),
    cause=("does not come back",),
    tensors=("blocks.1.attention.k.weight", "blocks.1.attention.v.weight"),
    clean=("zero3-cp2", "cp4-all-gather"),
)
