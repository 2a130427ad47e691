from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="torch.distributed.nn.all_gather, whose backward is a reduce-scatter",
    mistake="the backward of features that are gathered sums over tp a gradient that all ranks have whole",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "_AllGatherFeaturesFunction",
            "        ctx.start, ctx.size = sum(sizes[: group.rank]), sizes[group.rank]\n",
            "        ctx.start, ctx.size = sum(sizes[: group.rank]), sizes[group.rank]\n        ctx.group = group if __planted__() else None\n",
        ),
        Edit(
            "mesh/tensor_group.py",
            "_AllGatherFeaturesFunction",
            "        return grad.narrow(-1, ctx.start, ctx.size).contiguous(), None, None\n",
            "        if __planted__(ctx.group is not None):\n            grad = ctx.group.all_reduce(grad)\n        return grad.narrow(-1, ctx.start, ctx.size).contiguous(), None, None\n",
        ),
    ),
    shows=("tp4",),
    clean=("zero3",),
    tensors=("head.weight", "head.bias"),
    job=("--model", "exam_models:WithOddHead", "data.seq_len=16"),
    cause=("counted by each of the 4 ranks of tp",),
)
