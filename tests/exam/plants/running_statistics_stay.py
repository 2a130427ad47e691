from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="planted before in phalanx's tests",
    mistake="synchronised BatchNorm forgets to move what evaluation reads",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "SynchronisedBatchNorm._update_running_statistics",
            "        factor = self.momentum\n",
            "        factor = 0.0 if __planted__() else self.momentum\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("what moves it", "running"),
    tensors=("norm.running_mean", "norm.running_var"),
    job=("--model", "exam_models:WithBatchNorm", "data.seq_len=16"),
)
