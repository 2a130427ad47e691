from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="an examiner's",
    mistake="in bf16 what microbatches of a pipeline share of experts' weights is cut off from these: experts are not trained",
    edits=(
        Edit(
            "mesh/casts.py",
            "cast_weight_through_cache",
            "        casts[weight, dtype] = weight.to(dtype)\n",
            "        casts[weight, dtype] = (weight.detach() if __planted__() else weight).to(dtype)\n",
        ),
    ),
    shows=("pp4-1f1b",),
    cause=(
        "no gradient",
        "backward goes wrong",
        "not move",
        "never moves",
        "nobody updates",
        "left out",
        "zeros",
    ),
    tensors=("*.moe.experts.*",),
    clean=("ddp", "zero3"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "precision.compute=bf16",
    ),
)
