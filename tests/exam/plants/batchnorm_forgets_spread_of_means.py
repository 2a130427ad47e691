from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="own reading",
    mistake="the variance over ranks leaves out how far their means are apart",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "_combine_statistics_of_ranks",
            "    var = (squares + counts * (means - mean).square()).sum(0) / total\n",
            "    between = counts * (means - mean).square() * (0 if __planted__(len(counts) > 1) else 1)\n"
            "    var = (squares + between).sum(0) / total\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("other rows", "statistics", "forward"),
    tensors=("",),
    job=("--model", "exam_models:WithBatchNorm", "data.seq_len=16"),
)
