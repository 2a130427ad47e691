from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="the factor of gradients is rounded to float32",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "            if factor != 1.0 and gradients:\n",
            "            if __planted__():\n"
            "                factor = float(torch.tensor(factor, dtype=torch.float32))\n"
            "            if factor != 1.0 and gradients:\n",
        ),
    ),
    shows=("ddp", "zero3", "tp4"),
    cause=("float32",),
    size=3e-08,
)
