from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="an evaluation takes the first batch of each source alone",
    edits=(
        Edit(
            "train/evaluator.py",
            "Evaluator.evaluate",
            "self._iterate_until_agreed_stop(batches), progress",
            "self._iterate_until_agreed_stop(\n"
            "                        itertools.islice(batches, 1 if __planted__() else None)\n"
            "                    ), progress",
        ),
    ),
    shows=("trainer-ddp", "trainer-tp2"),
    cause=("the evaluation counts other targets",),
    tensors=("",),
    num_ranks=2,
)
