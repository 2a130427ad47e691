from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="an overflow halves the loss scale and keeps the count of good steps",
    edits=(
        Edit(
            "parallel/loss_scale.py",
            "LossScale.adjust_after_step",
            "            self.scale, self.good_steps = self.scale / 2, 0\n",
            "            self.scale, self.good_steps = self.scale / 2, (self.good_steps if __planted__() else 0)\n",
        ),
    ),
    shows=("trainer-loss-scale",),
    cause=("good steps", "loss scale"),
    tensors=("",),
)
