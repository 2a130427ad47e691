from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading",
    mistake="a step that is repeated drops what the next one will",
    edits=(
        Edit(
            "train/step_repeat.py",
            "NonFiniteStepRepeater._repeat",
            "self._data.objective, step=step)",
            "self._data.objective, step=step + 1 if __planted__() else step)",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("repeat",),
    num_ranks=2,
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
