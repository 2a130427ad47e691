from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="OLMo-core CHANGELOG",
    mistake="a step that is skipped is applied all the same",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "            if skipped is None:\n",
            "            if skipped is None or __planted__():\n",
        ),
    ),
    shows=("trainer-zero3",),
    cause=("skip",),
)
