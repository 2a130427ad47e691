from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="OLMo-core CHANGELOG (SkipStepAdamW)",
    mistake="after a skipped step the optimizer's count of steps goes on",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "        self.state.step = step\n",
            "        for slots in optimizer.state.values() if __planted__(skipped is not None) else ():\n"
            '            slots["step"] += 1\n'
            "        self.state.step = step\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("skip", "optimizer"),
)
