from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading: schedules that fall from step 0 on",
    mistake="the cosine falls as if it had begun with the warm-up",
    edits=(
        Edit(
            "optim/schedule.py",
            "learning_rate",
            "    done = (step - warmup) / max(1, total_steps - warmup)\n",
            "    done = (step - warmup) / max(1, total_steps - warmup)\n"
            '    if __planted__(optim.schedule == "cosine" and warmup > 0):\n'
            "        done = step / total_steps\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("schedule", "learning rate", "warm-up", "warmup", "cosine"),
    clean=("ddp", "plain"),
)
