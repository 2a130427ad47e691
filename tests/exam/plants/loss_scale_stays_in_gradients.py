from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="DeepSpeed 1f70662 (#7171)",
    mistake="the loss scale is not divided out before clipping",
    edits=(
        Edit(
            "parallel/loss_scale.py",
            "LossNormalizer.gradient_multiplier",
            "        return num_ranks * self.constant / num_targets / self._scale_or_one\n",
            "        scale = 1.0 if __planted__(self._scale_or_one != 1.0) else self._scale_or_one\n"
            "        return num_ranks * self.constant / num_targets / scale\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("loss scale", "65536", "1/65536"),
    job=("--shrink", "precision.compute=fp16"),
)
