from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading: decoupled decay that is not multiplied by the schedule",
    mistake="weights decay by the peak rate in each step, whatever the rate of the step is",
    edits=(
        Edit(
            "optim/build.py",
            "set_learning_rate",
            '        group["lr"] = lr\n',
            '        if __planted__(lr not in (0.0, group["lr"]) and group["weight_decay"] > 0):\n'
            '            group["weight_decay"] *= group["lr"] / lr\n'
            '        group["lr"] = lr\n',
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("decay",),
    clean=("plain",),
)
