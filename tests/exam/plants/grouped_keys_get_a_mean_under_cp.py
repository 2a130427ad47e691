from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="under cp keys that several queries share get the mean of what these owe them",
    edits=(
        Edit(
            "parallel/context/block_attention.py",
            "BlockAttention.backward",
            "            into[:, :, block.columns] += each.to(grad_q.dtype).unflatten(1, (heads, -1)).sum(2)\n",
            "            by_group = each.to(grad_q.dtype).unflatten(1, (heads, -1))\n"
            "            is_shared = by_group.shape[2] > 1\n"
            "            into[:, :, block.columns] += by_group.mean(2) if __planted__(is_shared) else by_group.sum(2)\n",
        ),
    ),
    shows=("cp4-all-gather",),
    cause=("queries that share a key",),
    tensors=("blocks.1.attention.k.*", "blocks.1.attention.v.*"),
    clean=("cp4", "ddp"),
    job=("--model", "llama3-8b", "--shrink"),
)
