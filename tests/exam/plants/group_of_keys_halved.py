from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="of grouped query heads only the mean, not the sum, reaches their keys",
    edits=(
        Edit(
            "parallel/context/block_attention.py",
            "BlockProducts.backward",
            "            into[:, :, block.columns] += each.to(grad_q.dtype).unflatten(1, (heads, -1)).sum(2)\n",
            "            grouped = each.to(grad_q.dtype).unflatten(1, (heads, -1))\n"
            "            total = grouped.mean(2) if __planted__(grouped.shape[2] > 1) else grouped.sum(2)\n"
            "            into[:, :, block.columns] += total\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("keys", "head"),
    tensors=("blocks.1.attention.k.weight", "blocks.1.attention.v.weight"),
    clean=("ddp-cp2-ulysses",),
    job=("--shrink", "model.num_heads=4", "model.num_kv_heads=2"),
)
