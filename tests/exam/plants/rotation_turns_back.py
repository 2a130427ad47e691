from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="the second half of a rotated pair turns the other way",
    edits=(
        Edit(
            "nn/rotary.py",
            "_rotate_by_table",
            "second * cos + first * sin",
            "second * cos + first * sin * (-1 if __planted__() else 1)",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
)
