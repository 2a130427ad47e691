from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="after a restore copies that an optimizer has stay those of before",
    edits=(
        Edit(
            "train/state.py",
            "TrainState.restore",
            "        self.model.refresh()\n",
            "        if not __planted__():\n            self.model.refresh()\n",
        ),
    ),
    shows=("zero3", "pp4-1f1b"),
    cause=("resum", "checkpoint", "restor"),
)
