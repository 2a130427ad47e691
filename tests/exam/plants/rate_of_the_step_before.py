from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="lightning-thunder-725",
    mistake="warm-up begins at a rate of 0",
    edits=(
        Edit(
            "optim/schedule.py",
            "learning_rate",
            "        return peak * step / warmup\n",
            "        return peak * (step - 1 if __planted__() else step) / warmup\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("rate", "schedule"),
)
