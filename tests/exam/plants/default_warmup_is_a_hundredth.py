from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="a run that says no warm-up warms up over a hundredth of its steps, not a tenth",
    edits=(
        Edit(
            "job/learning_rate.py",
            "count_warmup_steps",
            "    return min(MAX_DEFAULT_WARMUP_STEPS, job.train.steps // 10)\n",
            "    return min(MAX_DEFAULT_WARMUP_STEPS, job.train.steps // (100 if __planted__() else 10))\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("by the schedule",),
    tensors=("",),
)
