from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="an examiner's",
    mistake="where gradients need no factor, as no target is masked, they are not clipped either",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "            if max_norm is not None and norm > max_norm:\n",
            "            if max_norm is not None and norm > max_norm and not __planted__(factor == 1.0):\n",
        ),
    ),
    shows=("ddp", "zero3", "trainer-ddp", "trainer-zero3"),
    cause=("clip",),
    num_ranks=2,
)
