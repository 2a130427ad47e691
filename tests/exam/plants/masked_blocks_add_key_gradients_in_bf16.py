from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="in bf16 the gradient of keys is rounded with each block of queries",
    edits=(
        Edit(
            "mesh/attend_blocks.py",
            "_attend_by_blocks_backward",
            "    sums = torch.zeros(2, batch, heads, tokens, width, dtype=lse.dtype, device=q.device)\n",
            "    narrow = k.dtype if __planted__() else lse.dtype\n"
            "    sums = torch.zeros(2, batch, heads, tokens, width, dtype=narrow, device=q.device)\n",
        ),
    ),
    shows=("definitions",),
    cause=("so many times one part",),
    tensors=("the gradient of keys*",),
    num_ranks=2,
)
