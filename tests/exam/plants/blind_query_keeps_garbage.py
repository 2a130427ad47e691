from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="queries that a masked block hides from all keys keep what the kernel says of them",
    edits=(
        Edit(
            "parallel/context/block_attention.py",
            "BlockAttention.forward",
            "        if block.mask is not None:\n",
            "        if block.mask is not None and not __planted__():\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("attends otherwise", "finite", "mask"),
    tensors=("",),
    clean=("ddp",),
    job=("--shrink", "model.sliding_window=10"),
)
