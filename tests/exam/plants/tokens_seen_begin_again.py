from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="axolotl#3940, open-instruct#1284",
    mistake="a resumed run counts the tokens that it has seen from 0",
    edits=(
        Edit(
            "train/state.py",
            "TrainState.finish_restoring",
            '        self.step, self.tokens_seen = int(facts["step"]), int(facts["tokens_seen"])\n',
            (
                '        self.step = int(facts["step"])\n'
                "        if not __planted__():\n"
                '            self.tokens_seen = int(facts["tokens_seen"])\n'
            ),
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("resum", "restor", "checkpoint", "tokens seen"),
    tensors=("",),
    num_ranks=2,
)
