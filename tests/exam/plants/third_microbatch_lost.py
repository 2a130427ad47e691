from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="Megatron-LM#7452",
    mistake="targets of the third microbatch are not counted",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "            add(loss.detach(), targets)\n",
            "            add(loss.detach(), targets * (0 if __planted__(index == 2) else 1))\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("targets",),
    tensors=("",),
)
