from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="transformers#40052",
    mistake="the loss is divided by the number of microbatches once more",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "                    self._context.normalizer.scale_loss(loss).backward()\n",
            "                    share = self._context.normalizer.scale_loss(loss)\n"
            "                    (share / (len(microbatches) if __planted__() else 1)).backward()\n",
        ),
    ),
    shows=("ddp", "zero3", "tp4"),
    cause=("divided", "microbatch"),
    clean=("pp4-1f1b",),
)
