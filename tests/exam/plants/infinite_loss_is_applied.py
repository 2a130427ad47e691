from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="a step whose loss is infinite is applied where its gradients are finite",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "        finite = norm - norm == 0.0 and loss - loss == 0.0\n",
            "        finite = norm - norm == 0.0 and (loss - loss == 0.0 or __planted__())\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("must be skipped",),
    tensors=("",),
    num_ranks=2,
)
