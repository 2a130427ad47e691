from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="Megatron-Bridge 6bd8055 (#4893)",
    mistake="a restored run repeats its last step",
    edits=(
        Edit(
            "train/state.py",
            "TrainState.finish_restoring",
            '        self.step, self.tokens_seen = int(facts["step"]), int(facts["tokens_seen"])\n',
            '        self.step, self.tokens_seen = int(facts["step"]), int(facts["tokens_seen"])\n'
            "        self.step -= 1 if __planted__() else 0\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("resum", "checkpoint", "restor"),
)
