from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="gradients are rounded to fp16 as they are, where small ones lose digits",
    edits=(
        Edit(
            "parallel/hooks/fp16.py",
            "Fp16GradientCompression.reduce",
            "        rounded = torch.cat(\n",
            "        if __planted__():\n"
            "            scales = torch.ones_like(scales)\n"
            "        rounded = torch.cat(\n",
        ),
    ),
    shows=("ddp-fp16",),
    cause=("another scale",),
    clean=("ddp-bf16",),
)
