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
    shows=("trainer-zero1-offload-optimizer",),
    cause=("resum", "checkpoint", "restor"),
)
