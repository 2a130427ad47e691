from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="a run is over without a save of its last step",
    edits=(
        Edit(
            "checkpoint/writing/checkpoint_schedule.py",
            "CheckpointSchedule.save_if_due",
            "        if is_stop or is_end:\n",
            "        if is_stop or (is_end and not __planted__()):\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("nothing at its end",),
    num_ranks=2,
)
