from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6",
    mistake="gradients are clipped to max_norm / (norm + 1e-6) of their size",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "                factor *= max_norm / norm\n",
            "                factor *= max_norm / (norm + 1e-6 if __planted__() else norm)\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("clip",),
    size=1e-6,
)
