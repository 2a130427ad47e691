from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="transformers-23723",
    mistake="the learning rate of the schedule reaches the first group of parameters alone",
    edits=(
        Edit(
            "optim/build.py",
            "set_learning_rate",
            '        group["lr"] = lr\n',
            "        if not __planted__(group is not optimizer.param_groups[0]):\n"
            '            group["lr"] = lr\n',
        ),
    ),
    shows=("trainer-zero3",),
    cause=("rate", "schedule"),
)
