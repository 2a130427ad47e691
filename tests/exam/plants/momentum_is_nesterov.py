from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="momentum is Nesterov's, in one process and in all layouts",
    edits=(
        Edit(
            "optim/optimizers/sgd.py",
            "build",
            "        momentum=optim.momentum,\n",
            (
                "        momentum=optim.momentum,\n"
                "        nesterov=__planted__(optim.momentum > 0),\n"
            ),
        ),
    ),
    shows=("trainer-ddp",),
    cause=("definition", "twice"),
    job=("--shrink", "optim.kind=sgd", "optim.momentum=0.9"),
)
