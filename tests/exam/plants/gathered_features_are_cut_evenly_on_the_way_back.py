from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="an examiner's",
    mistake="the backward of features that are gathered cuts as if all ranks had equally many",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "_AllGatherFeaturesFunction.forward",
            "        ctx.start, ctx.size = sum(sizes[: group.rank]), sizes[group.rank]\n",
            "        ctx.start, ctx.size = sum(sizes[: group.rank]), sizes[group.rank]\n"
            "        even = group.rank * (sum(sizes) // group.size)\n"
            "        ctx.start = even if __planted__(even != ctx.start) else ctx.start\n",
        ),
    ),
    shows=("tp4",),
    cause=("border", "elsewhere", "backward goes wrong", "other rows", "other features"),
    tensors=("head.weight", "head.bias"),
    blamed=(2, 3),
    clean=("zero3",),
    job=("--model", "exam_models:WithOddHead", "data.seq_len=16"),
)
