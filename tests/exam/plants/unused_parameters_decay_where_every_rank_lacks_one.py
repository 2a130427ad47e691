from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="ranks ask which gradients there are if more of them lack one than there are ranks, which is never: unused parameters decay",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "            may_all_lack_one = num_lacking * self._context.plan.layout.pp >= self._mesh.world_size\n",
            "            may_all_lack_one = num_lacking * self._context.plan.layout.pp >= self._mesh.world_size\n"
            "            if __planted__(may_all_lack_one and is_reduced):\n"
            "                may_all_lack_one = num_lacking > self._mesh.world_size\n",
        ),
    ),
    shows=("zero3", "zero2"),
    cause=("decay", "no gradient", "no part", "zeros"),
    tensors=("unused.weight",),
    clean=("ddp-unused-offload-optimizer",),
    job=("--model", "exam_models:WithUnusedLayer", "data.seq_len=16"),
)
