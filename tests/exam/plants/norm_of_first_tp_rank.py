from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="DeepSpeed 0896503 (#5411)",
    mistake="only gradients of the first rank of tp count in the norm",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer._collect_gradients_and_squares",
            "        gradients, squares = collect_gradients_and_sum_squares(\n"
            "            self._parameters.iterate_optimizer_parameters(), self._held\n"
            "        )\n",
            "        gradients, squares = collect_gradients_and_sum_squares(\n"
            "            self._parameters.iterate_optimizer_parameters(), self._held\n"
            "        )\n"
            '        if __planted__(self._mesh.coordinates["tp"] > 0):\n'
            "            squares = squares * 0.0\n",
        ),
    ),
    shows=("tp4", "zero2-tp2"),
    cause=("only what rank 0 holds",),
    tensors=("",),
    clean=("zero3",),
)
