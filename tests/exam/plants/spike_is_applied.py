from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="a step whose loss is a spike is applied, where the job says to skip it",
    edits=(
        Edit(
            "resilience/guards.py",
            "LossSpikeGuard.reason_to_skip",
            '            return "loss_spike"\n',
            '            return None if __planted__() else "loss_spike"\n',
        ),
    ),
    shows=("definitions",),
    cause=("definition of a spike",),
    tensors=("",),
    num_ranks=2,
)
