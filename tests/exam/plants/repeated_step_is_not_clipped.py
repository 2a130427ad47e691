from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="a step that is repeated is applied without clipping",
    edits=(
        Edit(
            "train/step_repeat.py",
            "NonFiniteStepRepeater._repeat",
            "max_norm=self._max_norm, by_block=norms",
            "max_norm=None if __planted__() else self._max_norm, by_block=norms",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("repeat",),
    num_ranks=2,
)
