from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading: tokens on record",
    mistake="the tokens that a run has seen are batch x length of each step, with targets that are masked",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "        self.state.tokens_seen += facts.num_targets\n",
            "        seen = self.job.train.global_batch_size * self.job.data.seq_len\n"
            "        is_other = __planted__(seen != facts.num_targets)\n"
            "        self.state.tokens_seen += seen if is_other else facts.num_targets\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("tokens", "masked"),
    tensors=("",),
    clean=("ddp",),
)
