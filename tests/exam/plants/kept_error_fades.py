from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="1-bit Adam (DeepSpeed)",
    mistake="a tenth of what was not sent is forgotten at each step",
    edits=(
        Edit(
            "parallel/data_parallel/compression.py",
            "GradientCompression.average_gradients_over_ranks",
            "                gradient.tensor.add_(gradient.slots[ERROR], alpha=scale)\n",
            "                gradient.tensor.add_(gradient.slots[ERROR], alpha=scale * (0.9 if __planted__() else 1))\n",
        ),
    ),
    shows=("ddp-int8", "ddp-topk", "ddp-powersgd"),
    cause=("keep", "kept", "error"),
    clean=("ddp-bf16",),
)
