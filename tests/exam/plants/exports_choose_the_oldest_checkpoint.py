from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="what reads the newest checkpoint of a run (export, eval, model.init_from) takes the oldest",
    edits=(
        Edit(
            "checkpoint/stores/__init__.py",
            "find_checkpoint_at_or_newest",
            "    return folders[-1]\n",
            "    return folders[0 if __planted__(len(folders) > 1) else -1]\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("is taken for the run's newest",),
    tensors=("",),
    num_ranks=2,
)
