from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="planted before in phalanx's tests",
    mistake="what other ranks owe to a block of keys does not come home",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_RingExchange.compute_own_key_value_gradients",
            "        return own_grad.add_(arriving())\n",
            "        from_others = arriving()\n"
            "        return own_grad if __planted__() else own_grad.add_(from_others)\n",
        ),
    ),
    shows=("cp4", "zero3-cp2"),
    cause=("does not come back",),
    tensors=("blocks.1.attention.k.weight", "blocks.1.attention.v.weight"),
    clean=("cp4-all-gather",),
)
