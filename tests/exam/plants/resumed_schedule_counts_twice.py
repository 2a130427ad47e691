from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="slime#1547",
    mistake="a resumed run adds the steps of before to those of the schedule once more",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "learning_rate(self.job, step, self.plan.peak_lr)",
            "learning_rate(self.job, step + (self.state.saved_step if __planted__(self.state.saved_step > 0) else 0), self.plan.peak_lr)",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("resum", "learning rate"),
    num_ranks=2,
)
