from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="the backward of attention without a fused kernel takes the sum over a row of the softmax from the keys of a block, not from the output over all",
    edits=(
        Edit(
            "mesh/attention_kernels.py",
            "UnfusedAttentionKernel.backward",
            "        row_sums = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)\n",
            "        row_sums = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)\n"
            "        if __planted__():\n"
            "            row_sums = (weights * (grad @ v.mT).to(weights.dtype)).sum(-1, keepdim=True)\n",
        ),
    ),
    shows=("cp4-all-gather", "zero3-cp2-all-gather"),
    cause=("backward goes wrong", "blocks of keys", "attend", "queries and keys", "softmax"),
    tensors=("blocks.1.attention.q.weight", "blocks.1.attention.k.weight"),
    clean=("cp4", "cp4-ulysses"),
)
