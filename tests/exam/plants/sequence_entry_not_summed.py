from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="planted before in phalanx's tests",
    mistake="the backward of an entry that gathers the sequence does not sum",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "_AllGatherTokensFunction.backward",
            "        return ctx.group.reduce_scatter_tokens(grad), None\n",
            "        return (ctx.group.select_tokens_of_rank(grad) if __planted__() else ctx.group.reduce_scatter_tokens(grad)), None\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("norm.weight",),
    clean=("tp4-whole-sequence",),
)
