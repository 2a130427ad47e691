from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="a save that is due while another is in flight is told to be postponed, and never done",
    edits=(
        Edit(
            "checkpoint/writing/checkpoint_schedule.py",
            "CheckpointSchedule._emit_postponed_save",
            "        self._is_postponed = True\n",
            "        self._is_postponed = not __planted__()\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("while another was in flight",),
    num_ranks=2,
)
