from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="DeepSpeed 1f70662 (#7171)",
    mistake="a step that overflows is skipped and the loss scale stays",
    edits=(
        Edit(
            "parallel/loss_scale.py",
            "LossScale.adjust_after_step",
            "            self.scale, self.good_steps = self.scale / 2, 0\n",
            "            self.scale, self.good_steps = self.scale / (1 if __planted__() else 2), 0\n",
        ),
    ),
    shows=("trainer-loss-scale",),
    cause=("loss scale",),
    job=("--shrink", "precision.compute=fp16"),
)
