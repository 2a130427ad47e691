from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="transformers#34191, torchtitan 0cb7435 (#2206)",
    mistake="each microbatch's gradient is that of its own mean, the reported loss is right",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "                    self._context.normalizer.scale_loss(loss).backward()\n",
            "                    share = self._context.normalizer.scale_loss(loss)\n"
            "                    even = self._context.normalizer.constant / 2 / targets.clamp(min=1)\n"
            "                    (share * (even if __planted__() else 1.0)).backward()\n",
        ),
    ),
    shows=("ddp", "zero3", "cp4"),
    cause=("mean of means",),
    clean=("pp4-1f1b",),
)
