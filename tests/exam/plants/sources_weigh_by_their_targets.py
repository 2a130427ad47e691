from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="the sources of an evaluation weigh by their targets where the job gives them weights",
    edits=(
        Edit(
            "train/evaluator.py",
            "Evaluator.evaluate",
            "self._source_weights or targets_by_source)\n",
            "targets_by_source if __planted__() else (self._source_weights or targets_by_source))\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("weights",),
    tensors=("",),
    clean=("ddp",),
)
