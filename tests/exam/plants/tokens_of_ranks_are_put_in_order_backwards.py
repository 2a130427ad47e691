from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="under Ulysses tokens of all ranks are put in the sequence's order by the permutation that takes them out of it",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_tokens_to_heads",
            "    return arrived.index_select(\n"
            "        2, group.chunks.indices_from_rank_order_to_sequence(arrived.shape[2], x_BHTE.device)\n"
            "    )\n",
            "    find_order = group.chunks.indices_from_rank_order_to_sequence\n"
            "    if __planted__():\n"
            "        find_order = group.chunks.positions_in_rank_order\n"
            "    return arrived.index_select(2, find_order(arrived.shape[2], x_BHTE.device))\n",
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
        "permut",
    ),
    tensors=("", "*"),
    clean=("cp4", "cp4-all-gather"),
)
