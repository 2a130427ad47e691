from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="the norm on record is that of after clipping",
    edits=(
        Edit(
            "train/step_recorder.py",
            "StepRecorder._emit_step",
            "            grad_norm=facts.grad_norm,\n",
            "            grad_norm=min(facts.grad_norm, self._job.optim.clip_norm)\n            if __planted__(self._job.optim.clip_norm)\n            else facts.grad_norm,\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("on record the gradient norm",),
    tensors=("",),
    num_ranks=2,
)
