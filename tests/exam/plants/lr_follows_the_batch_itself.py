from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="the rate of Adam follows the batch in proportion, instead of its square root",
    edits=(
        Edit(
            "job/learning_rate.py",
            "resolve_peak_learning_rate",
            '    if rule == "sqrt":\n',
            '    if rule == "sqrt" and not __planted__():\n',
        ),
    ),
    shows=("trainer-ddp",),
    cause=("by the schedule",),
    tensors=("",),
    job=("--shrink", "optim.lr_scaling=auto", "optim.reference_batch_size=4"),
)
