from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="in bf16 a pipeline multiplies with casts of the first step's weights",
    edits=(
        Edit(
            "mesh/casts.py",
            "sharing_casts_between_autocast_regions",
            "    _shared_casts_stack.append({})\n",
            "    _shared_casts_stack.append(vars(sharing_casts_between_autocast_regions).setdefault('old', {}) if __planted__() else {})\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("backward goes wrong", "stale", "other weights"),
    tensors=("*.moe.*",),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "precision.compute=bf16",
    ),
)
