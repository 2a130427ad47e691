from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="a step in which nobody has found corruption is taken for one of corruption",
    edits=(
        Edit(
            "train/corruption.py",
            "_find_corruption",
            "    if not code:\n",
            "    if not code and not __planted__():\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("replicas hold other bits",),
    num_ranks=2,
)
