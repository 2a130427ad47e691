from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="an examiner's",
    mistake="weight and bias of BatchNorm get the sums over ranks that its input's gradient is made of, which data parallelism adds up once more",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "_NormaliseWithGivenStatistics.backward",
            "            ctx.ranks.sum_over_ranks(sums)\n",
            "            ctx.ranks.sum_over_ranks(sums)\n"
            "            if __planted__():\n"
            "                grad_bias, grad_weight = sums.clone().split(len(grad_bias))\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("4 x", "summed"),
    tensors=("norm.weight", "norm.bias"),
    job=("--model", "exam_models:WithBatchNorm", "data.seq_len=16"),
)
