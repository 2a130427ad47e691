from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="DeepSpeed 1f70662 (#7171)",
    mistake="a step whose norm is infinite on another rank is applied",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "        finite = norm - norm == 0.0 and loss - loss == 0.0\n",
            "        finite = loss - loss == 0.0 and (norm - norm == 0.0 or __planted__(norm == float('inf')))\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("finite",),
)
