from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="planted before in phalanx's tests",
    mistake="each rank normalises over its own rows",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "BatchStatisticsGroup.gather",
            "        if not self.all:\n",
            "        if not self.all or __planted__():\n",
        ),
        Edit(
            "parallel/batchnorm/layer.py",
            "BatchStatisticsGroup.sum_over_ranks",
            "        if self.all:\n",
            "        if self.all and not __planted__():\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("other rows",),
    tensors=("",),
    job=("--model", "exam_models:WithBatchNorm", "data.seq_len=16"),
)
