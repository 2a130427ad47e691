from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="Megatron-Bridge#5944",
    mistake="step n trains on the data of step n - 1",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "            microbatches = self.data.batches.step_microbatches(step)\n",
            "            read = max(1, step - 1) if __planted__() else step\n"
            "            microbatches = self.data.batches.step_microbatches(read)\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("data of step 1", "another batch"),
)
