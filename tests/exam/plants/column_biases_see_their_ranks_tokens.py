from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="TransformerEngine#435 (own reading): biases under sequence parallelism",
    mistake="with a gathered input the gradient of a column's bias is of this rank's part of the sequence alone",
    edits=(
        Edit(
            "parallel/tensor/gathered_input.py",
            "_LinearOfGatheredInputFunction.backward",
            "            grad_bias = rows.sum(0) if ctx.adds_bias else grad.sum(tuple(range(grad.ndim - 1)))\n",
            "            grad_bias = rows.sum(0) if ctx.adds_bias else grad.sum(tuple(range(grad.ndim - 1)))\n            if __planted__(grad.ndim == 3):\n                group = ctx.gathered.group\n                grad_bias = grad.chunk(group.size, dim=1)[group.rank].sum((0, 1))\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    clean=("ddp", "tp4-whole-sequence"),
    tensors=("*.q.bias", "*.k.bias", "*.v.bias", "*.up.bias", "*.gate.bias"),
    job=("--shrink", "model.bias=all"),
    cause=("a part of them (one rank of tp's",),
)
