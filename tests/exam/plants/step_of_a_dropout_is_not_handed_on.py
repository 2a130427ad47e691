from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="the trainer does not say which step it is, and a resumed run counts from 1",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "self.data.objective, step=step)",
            "self.data.objective, step=None if __planted__() else step)",
        ),
    ),
    shows=("trainer-zero3",),
    cause=("masks of another step",),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
