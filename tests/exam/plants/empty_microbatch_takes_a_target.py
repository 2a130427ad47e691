from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="a microbatch without targets takes one off the count",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "            add(loss.detach(), targets)\n",
            "            add(loss.detach(), targets if not __planted__(not bool(targets)) else targets - 1)\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("targets",),
    tensors=("",),
)
