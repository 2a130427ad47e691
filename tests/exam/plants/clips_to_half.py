from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="usual mistake of own loops",
    mistake="clipping uses twice the norm",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "factor *= max_norm / norm",
            "factor *= max_norm / norm / (2 if __planted__() else 1)",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("clip",),
)
