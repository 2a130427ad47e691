from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading: dampening of torch's SGD",
    mistake="gradients enter the momentum of sgd by 0.999",
    edits=(
        Edit(
            "optim/optimizers/sgd.py",
            "build",
            "        momentum=optim.momentum,\n",
            "        momentum=optim.momentum,\n"
            "        dampening=0.001 if __planted__(optim.momentum > 0) else 0.0,\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("momentum", "dampen", "optimizer"),
    clean=("plain",),
    size=0.001,
    job=("--shrink", "optim.kind=sgd", "optim.momentum=0.9"),
)
