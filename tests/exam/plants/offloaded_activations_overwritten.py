from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="DeepSpeed be60451 (#7898)",
    mistake="a buffer in host memory is used again before it was read",
    edits=(
        Edit(
            "parallel/offload/activations.py",
            "SavedTensorOffloader._find_host_copy",
            "        if owner is None or offloaded is None or owner() is None or then != version:\n",
            "        if owner is None or offloaded is None or (owner() is None and not __planted__()) or then != version:\n",
        ),
    ),
    shows=("ddp-offload-activations",),
    cause=("offload", "backward goes wrong"),
    clean=("ddp",),
)
