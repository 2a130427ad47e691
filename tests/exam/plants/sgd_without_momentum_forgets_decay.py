from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="SGD without momentum does not decay, in one process and in all layouts",
    edits=(
        Edit(
            "optim/optimizers/sgd.py",
            "build",
            "        groups.with_decay(optim.weight_decay, auto=WEIGHT_DECAY),\n",
            (
                "        groups.with_decay(\n"
                "            0.0 if __planted__(not optim.momentum) else optim.weight_decay, auto=WEIGHT_DECAY\n"
                "        ),\n"
            ),
        ),
    ),
    shows=("definitions", "trainer-ddp"),
    cause=("decay", "optimizer"),
    num_ranks=2,
    job=("--shrink", "optim.kind=sgd", "optim.momentum=0", "optim.weight_decay=0.1"),
)
