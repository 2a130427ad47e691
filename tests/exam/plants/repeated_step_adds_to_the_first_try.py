from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="a step that is repeated adds its gradients to those of the first try",
    edits=(
        Edit(
            "train/step_repeat.py",
            "NonFiniteStepRepeater._repeat",
            "        state.optimizer.zero_grad(set_to_none=True)\n",
            "        if not __planted__():\n"
            "            state.optimizer.zero_grad(set_to_none=True)\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("the step is repeated",),
    tensors=("",),
    num_ranks=2,
)
