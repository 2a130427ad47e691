from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="planted before in phalanx's tests",
    mistake="the mean over ranks is never taken of bfloat16 gradients",
    edits=(
        Edit(
            "parallel/hooks/bf16.py",
            "Bf16.reduce",
            "            gradient.tensor.copy_(part.view_as(gradient.tensor)).div_(wire.num_ranks)\n",
            "            total = gradient.tensor.copy_(part.view_as(gradient.tensor))\n"
            "            total.div_(1 if __planted__() else wire.num_ranks)\n",
        ),
    ),
    shows=("ddp-bf16",),
    cause=("summed", "4 x"),
    clean=("ddp-fp16",),
)
