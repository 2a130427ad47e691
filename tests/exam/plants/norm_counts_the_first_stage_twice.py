from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="planted before in phalanx's tests",
    mistake="gradients of the first rank of a pipeline count twice in the norm",
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
            '        first_of_many = self._mesh.layout.pp > 1 and self._mesh.coordinates["pp"] == 0\n'
            "        squares = squares * (2.0 if __planted__(first_of_many) else 1.0)\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-tp2-zb-v"),
    cause=("counted twice",),
    tensors=("",),
    clean=("tp4",),
)
