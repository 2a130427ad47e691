from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="an examiner's",
    mistake="a job that says no weight decay decays under SGD by what AdamW's default is",
    edits=(
        Edit(
            "optim/optimizers/sgd.py",
            "build",
            "auto=WEIGHT_DECAY)",
            "auto=0.1 if __planted__() else WEIGHT_DECAY)",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("decay",),
    num_ranks=2,
    job=("--shrink", "optim.kind=sgd", "optim.momentum=0.9"),
)
