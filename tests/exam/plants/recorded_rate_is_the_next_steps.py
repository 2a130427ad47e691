from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="the rate on record is that of the step after",
    edits=(
        Edit(
            "train/step_recorder.py",
            "StepRecorder._emit_step",
            "            learning_rate=learning_rate(self._job, step, self._plan.peak_lr),\n",
            "            learning_rate=learning_rate(self._job, step + __planted__(), self._plan.peak_lr),\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("on record the learning rate",),
    tensors=("",),
    num_ranks=2,
)
