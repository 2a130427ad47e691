from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="a restored loss scale begins to count good steps at 0",
    edits=(
        Edit(
            "parallel/loss_scale.py",
            "LossScale.load_saved_state",
            '            self.scale, self.good_steps = float(facts["scale"]), int(facts["good_steps"])\n',
            (
                '            self.scale, self.good_steps = float(facts["scale"]), int(facts["good_steps"])\n'
                "            if __planted__(self.good_steps > 0):\n"
                "                self.good_steps = 0\n"
            ),
        ),
    ),
    shows=("trainer-loss-scale",),
    cause=("resum", "restor", "checkpoint", "good steps"),
    tensors=("",),
    job=("--shrink", "precision.compute=fp16"),
)
