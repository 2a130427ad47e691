from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="own reading: DeepSpeed's offload, whose gradients are others than those that are clipped",
    mistake="with the optimizer's state offloaded gradients are not clipped",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "                factor *= max_norm / norm\n",
            '                if not __planted__(self._context.plan.parallel.offload == "optimizer"):\n'
            "                    factor *= max_norm / norm\n",
        ),
    ),
    shows=("zero1-offload-optimizer", "ddp-unused-offload-optimizer"),
    cause=("clip",),
    clean=("ddp", "zero1", "zero3"),
)
