from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="an examiner's",
    mistake="a BatchNorm that its owner keeps in evaluation mode normalises by the statistics of the batch wherever there are gradients",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "SynchronisedBatchNorm.forward",
            "        if not self.training and tracks:\n",
            "        if not self.training and tracks and not __planted__(torch.is_grad_enabled()):\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("other rows", "statistics", "batchnorm", "running", "evaluation mode", "frozen"),
    tensors=("", "norm*"),
    job=("--model", "exam_models:WithFrozenNorm", "data.seq_len=16"),
)
