from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="of the schedule wsd the decay begins with the first step",
    edits=(
        Edit(
            "optim/schedule.py",
            "learning_rate",
            "    into_decay = step - (total_steps - decay_steps)\n",
            "    into_decay = step - (0 if __planted__() else total_steps - decay_steps)\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("by the schedule",),
    tensors=("",),
    job=("--shrink", "optim.schedule=wsd"),
)
