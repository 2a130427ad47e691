from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="HF Trainer's loss under gradient accumulation",
    mistake="the loss on record is divided by the number of microbatches once more",
    edits=(
        Edit(
            "train/step_recorder.py",
            "StepRecorder._emit_step",
            "            loss=facts.loss,\n",
            "            loss=facts.loss / (self._plan.num_microbatches if __planted__() else 1),\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-tp2"),
    cause=("on record the loss",),
    tensors=("",),
    num_ranks=2,
)
