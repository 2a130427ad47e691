from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="own reading",
    mistake="running statistics that are to be means over all batches move by a tenth",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "SynchronisedBatchNorm._update_running_statistics",
            "                factor = 1.0 / float(self.num_batches_tracked)\n",
            "                factor = 1.0 / float(self.num_batches_tracked)\n"
            "                factor = 0.1 if __planted__() else factor\n",
        ),
    ),
    shows=("ddp", "zero3", "trainer-ddp"),
    cause=("another factor (momentum)",),
    tensors=("norm.running_mean", "norm.running_var"),
    job=("--model", "exam_models:WithAveragingBatchNorm", "data.seq_len=16"),
    num_ranks=2,
)
