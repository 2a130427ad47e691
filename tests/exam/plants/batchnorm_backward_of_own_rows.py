from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="pytorch SyncBatchNorm",
    mistake="the backward of BatchNorm takes means over a rank's own rows",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "BatchStatisticsGroup.sum_over_ranks",
            "        if self.all:\n",
            "        if self.all and not __planted__():\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("backward goes wrong", "batchnorm", "not reduced"),
    tensors=("linear.*", "embed.weight"),
    job=("--model", "exam_models:WithBatchNorm", "data.seq_len=16"),
)
