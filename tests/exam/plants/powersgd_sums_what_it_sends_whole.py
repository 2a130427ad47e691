from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading: powersgd's vectors",
    mistake="vectors, which powersgd sends as they are, are added up over ranks and not averaged",
    edits=(
        Edit(
            "parallel/hooks/powersgd.py",
            "_average_in_one_collective",
            "        tensor.copy_(part.view_as(tensor))\n",
            "        tensor.copy_(part.view_as(tensor) * (wire.num_ranks if __planted__(tensor.ndim == 1) else 1))\n",
        ),
    ),
    shows=("ddp-powersgd",),
    clean=("ddp-int8", "ddp"),
    tensors=("*norm*",),
    cause=("summed over the data-parallel ranks",),
)
