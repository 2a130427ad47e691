from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="gradients of the second microbatch weigh one in ten thousand more",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "                    self._context.normalizer.scale_loss(loss).backward()\n",
            "                    share = self._context.normalizer.scale_loss(loss)\n"
            "                    (share * (1.0001 if __planted__(index == 1) else 1.0)).backward()\n",
        ),
    ),
    shows=("ddp", "zero3", "tp4"),
    cause=("microbatch 2 of 3 (1.0001 x)",),
    clean=("pp4-1f1b",),
    size=0.0001,
)
