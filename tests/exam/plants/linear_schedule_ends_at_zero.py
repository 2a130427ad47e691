from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="the linear schedule comes down to 0, whatever min_lr_ratio says",
    edits=(
        Edit(
            "optim/schedule.py",
            "learning_rate",
            "        return low + (peak - low) * max(0.0, 1 - done)\n",
            (
                "        if __planted__(low > 0 and done > 0):\n"
                "            return peak * max(0.0, 1 - done)\n"
                "        return low + (peak - low) * max(0.0, 1 - done)\n"
            ),
        ),
    ),
    shows=("trainer-ddp",),
    cause=("learning rate", "schedule"),
    num_ranks=2,
    job=("--shrink", "optim.schedule=linear"),
)
