from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="cosine decay is stretched by one step",
    edits=(
        Edit(
            "optim/schedule.py",
            "learning_rate",
            "    done = (step - warmup) / max(1, total_steps - warmup)\n",
            "    done = (step - warmup) / max(1, total_steps - warmup + (1 if __planted__() else 0))\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("rate", "schedule"),
)
