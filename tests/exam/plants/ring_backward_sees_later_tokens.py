from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="the backward of attention to a rank's own keys leaves out that it is causal",
    edits=(
        Edit(
            "mesh/attention_kernels.py",
            "CpuFlashAttentionKernel.backward",
            "        return op(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask)\n",
            "        is_causal = is_causal and not __planted__()\n"
            "        return op(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask)\n",
        ),
    ),
    shows=("cp4", "zero3-cp2"),
    cause=(
        "backward goes wrong",
        "attend",
        "softmax",
        "queries and keys",
        "causal",
        "later tokens",
        "blocks of keys",
    ),
    tensors=("blocks.*.attention.[qkv].weight",),
    clean=("ddp", "cp4-ulysses"),
)
