from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="where weights are sharded SGD has no momentum",
    edits=(
        Edit(
            "optim/optimizers/sgd.py",
            "build",
            "        momentum=optim.momentum,\n",
            '        momentum=0.0 if __planted__(any(hasattr(p, "to_local") for p in groups.parameters())) else optim.momentum,\n',
        ),
    ),
    shows=("zero2", "zero3"),
    cause=("its momentum were lost",),
    clean=("ddp",),
    job=("--shrink", "optim.kind=sgd", "optim.momentum=0.9"),
)
