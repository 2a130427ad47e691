from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="a loss scale that the job fixes doubles after each good step",
    edits=(
        Edit(
            "parallel/loss_scale.py",
            "LossScale.adjust_after_step",
            "if not self.is_dynamic:",
            "if not self.is_dynamic and not __planted__():",
        ),
    ),
    shows=("trainer-loss-scale",),
    cause=("the loss scale is",),
    tensors=("",),
    job=("--shrink", "precision.compute=fp16", "precision.loss_scale=1024"),
    num_ranks=2,
)
