from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="BLOOM-176B, DeepSpeed#1801",
    mistake="only the first rank of tp clips",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "factor *= max_norm / norm",
            'factor *= 1.0 if __planted__(self._mesh.coordinates["tp"] > 0) else max_norm / norm',
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("clip",),
    blamed=(1, 2, 3),
    clean=("zero3",),
)
