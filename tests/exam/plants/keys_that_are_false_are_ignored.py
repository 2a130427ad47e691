from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="a key of the job's model that is false, or 0, gives way to its preset's",
    edits=(
        Edit(
            "job/model.py",
            "list_user_set_keys",
            "for key in SHAPE_KEYS if getattr(model, key) is not None}",
            "for key in SHAPE_KEYS if (getattr(model, key) if __planted__() else getattr(model, key) is not None)}",
        ),
    ),
    shows=("definitions",),
    cause=("in the shape, and the job says",),
    tensors=("model.*",),
    num_ranks=2,
)
