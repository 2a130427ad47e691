from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="samples of a skipped step are not counted as read",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "        self.state.samples_seen += self.job.train.global_batch_size\n",
            "        self.state.samples_seen += 0 if __planted__(skipped is not None) else self.job.train.global_batch_size\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("samples seen",),
    tensors=("",),
)
