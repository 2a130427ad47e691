from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="own reading",
    mistake="the running variance lacks n / (n - 1)",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "SynchronisedBatchNorm._update_running_statistics",
            "        unbiased = statistics.var * (statistics.count / (statistics.count - 1))\n",
            "        unbiased = statistics.var * (statistics.count / (statistics.count - 1))\n"
            "        unbiased = statistics.var if __planted__() else unbiased\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("what moves it", "running", "variance"),
    tensors=("norm.running_var",),
    job=("--model", "exam_models:WithBatchNorm", "data.seq_len=16"),
)
