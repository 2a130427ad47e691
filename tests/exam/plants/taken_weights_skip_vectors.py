from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="a run that begins with other weights (model.init_from) leaves vectors as they are drawn",
    edits=(
        Edit(
            "checkpoint/reading/load.py",
            "load_checkpoint_into_shards",
            "                target.copy_(source)\n",
            "                if not __planted__(weights_only and target.ndim < 2):\n"
            "                    target.copy_(source)\n",
        ),
    ),
    shows=("trainer-zero3",),
    cause=("model.init_from",),
    tensors=("*norm*",),
    num_ranks=2,
    job=("--shrink", "model.init_from=weights"),
)
