from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading: flash attention's log-sum-exp is float32",
    mistake="ring and all-gather attention keep the log-sum-exp of a forward in float32 for the backward",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_BlockwiseAttentionFunction.forward",
            "            q, kv, out, running.lse, *((mask,) if isinstance(mask, torch.Tensor) else ())\n",
            "            q,\n"
            "            kv,\n"
            "            out,\n"
            "            running.lse.float().to(running.lse.dtype) if __planted__() else running.lse,\n"
            "            *((mask,) if isinstance(mask, torch.Tensor) else ()),\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("round", "float32", "narrow"),
    tensors=("blocks.*.attention.[qkv].weight",),
    clean=("ddp", "cp4-ulysses"),
    size=6e-08,
)
