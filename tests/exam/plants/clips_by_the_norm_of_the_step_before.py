from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading: clipping that does not wait for the norm",
    mistake="from the second step on gradients are clipped by the norm of the step before",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "            if max_norm is not None and norm > max_norm:\n"
            "                factor *= max_norm / norm\n",
            '            before = self.__dict__.get("_norm_before", norm)\n'
            "            self._norm_before = norm\n"
            "            if max_norm is not None and norm > max_norm:\n"
            "                factor *= max_norm / (before if __planted__(before != norm) else norm)\n",
        ),
    ),
    shows=("ddp", "zero3", "tp4"),
    cause=("clip",),
    tensors=("", "*"),
)
