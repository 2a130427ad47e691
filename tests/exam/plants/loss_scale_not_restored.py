from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="Megatron-Bridge 9aae95f (#5255)",
    mistake="a restored run begins with the first loss scale",
    edits=(
        Edit(
            "train/state.py",
            "TrainState.finish_restoring",
            "        if self.model.loss_scale is not None and LOSS_SCALE_FACT in facts:\n",
            "        if self.model.loss_scale is not None and LOSS_SCALE_FACT in facts and not __planted__():\n",
        ),
    ),
    shows=("trainer-loss-scale",),
    cause=("resum", "checkpoint", "restor"),
    job=("--shrink", "precision.compute=fp16"),
)
