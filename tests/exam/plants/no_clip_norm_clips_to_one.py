from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="a job without a clipping norm is clipped to 1",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "        if finite:\n            if max_norm is not None and norm > max_norm:\n",
            "        if finite:\n"
            "            if max_norm is None and __planted__():\n"
            "                max_norm = 1.0\n"
            "            if max_norm is not None and norm > max_norm:\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("clipping",),
    job=("--shrink", "optim.clip_norm=none"),
    num_ranks=2,
)
