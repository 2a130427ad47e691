from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="under cp a window has one token less",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelMaskBuilder.__call__",
            "            keep = keep & (back < window)\n",
            "            keep = keep & (back < window - (1 if __planted__() else 0))\n",
        ),
    ),
    shows=("cp4", "zero3-cp2"),
    cause=("window",),
    tensors=("",),
    clean=("ddp",),
    job=("--shrink", "model.sliding_window=10"),
)
