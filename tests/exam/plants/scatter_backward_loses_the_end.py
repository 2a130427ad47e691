from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="gradients of the last token are lost where a region is left",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "_ReduceScatterTokensFunction.backward",
            "        return ctx.group.all_gather_tokens(grad), None\n",
            "        whole = ctx.group.all_gather_tokens(grad)\n"
            "        if __planted__():\n"
            "            whole = whole.clone()\n"
            "            whole[:, -1] = 0\n"
            "        return whole, None\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("backward", "cut", "region"),
    tensors=("blocks.1.ffn.*",),
    clean=("tp4-whole-sequence",),
)
