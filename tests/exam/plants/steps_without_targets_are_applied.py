from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="a step without targets is applied: weights decay and go on by their momentum",
    edits=(
        Edit(
            "parallel/step_stats.py",
            "StepStats.reason_to_skip",
            "        if self.num_targets == 0:\n",
            "        if self.num_targets == 0 and not __planted__():\n",
        ),
    ),
    shows=("trainer-zero3", "trainer-ddp"),
    cause=("skip", "without target", "no target"),
    num_ranks=2,
)
