from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="the trainer clips from step 3 on only",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "max_norm=self.job.optim.clip_norm, ",
            "max_norm=None if __planted__(step < 3) else self.job.optim.clip_norm, ",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("clip",),
)
