from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="accelerate#2142, transformers#24088",
    mistake="the schedule goes on by as many steps as there are ranks of data parallelism",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "learning_rate(self.job, step, self.plan.peak_lr)",
            "learning_rate(self.job, min(self.job.train.steps, step * self.mesh.layout.data_parallel_size) if __planted__(self.mesh.layout.data_parallel_size > 1) else step, self.plan.peak_lr)",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("learning rate", "schedule"),
    num_ranks=2,
)
