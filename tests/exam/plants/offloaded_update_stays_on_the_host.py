from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="forum-84911, MPS addcmul_",
    mistake="what the optimizer updates on the host never reaches the model",
    edits=(
        Edit(
            "parallel/offload/optimizer.py",
            "copy_to_pinned_host_memory",
            "        return tensor\n",
            "        return tensor.clone() if __planted__() else tensor\n",
        ),
        Edit(
            "parallel/optimizer_params.py",
            "OptimizerParameterSubstitute.copy_updated_values_to_model",
            "        if in_model.data_ptr() != in_optimizer.data_ptr():\n",
            "        if not __planted__() and in_model.data_ptr() != in_optimizer.data_ptr():\n",
        ),
    ),
    shows=("ddp-unused-offload-optimizer", "zero1-offload-optimizer"),
    cause=("stale", "not updated", "other weights", "update"),
    clean=("ddp",),
)
