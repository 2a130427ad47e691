from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="DeepSpeed 0896503 (#5411)",
    mistake="each rank clips by the norm of its own shards",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "            self._mesh.all_reduce_sum(vector)\n",
            "            own_square = vector[2].clone()\n"
            "            self._mesh.all_reduce_sum(vector)\n"
            "            if __planted__():\n"
            "                vector[2] = own_square\n",
        ),
    ),
    shows=("zero3", "tp4", "pp4-1f1b"),
    cause=("norm of what rank", "norm of stage", "missing"),
    tensors=("",),
)
