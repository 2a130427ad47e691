from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="Megatron-LM#7452 f.7",
    mistake="with zig-zag chunks ulysses attends in the order of ranks",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_to_heads",
            "    return arrived.index_select(2, group.chunks.inverse_rank_order(arrived.shape[2], x_BHTE.device))\n",
            "    order = group.chunks.inverse_rank_order(arrived.shape[2], x_BHTE.device)\n"
            "    return arrived.index_select(2, order.sort().values if __planted__() else order)\n",
        ),
    ),
    shows=("cp4-ulysses",),
    cause=("attends otherwise", "order", "mask"),
    tensors=("",),
    clean=("cp4",),
)
