from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="a step is applied whatever the run's guards say of it",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "        skipped = next((reason for reason in reasons if reason), None)\n",
            "        skipped = next((reason for reason in reasons if reason), None)\n        skipped = facts.reason_to_skip if __planted__(skipped != facts.reason_to_skip) else skipped\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("must be skipped",),
    num_ranks=2,
)
