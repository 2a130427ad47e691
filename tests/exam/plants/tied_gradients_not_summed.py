from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="planted before in phalanx's tests",
    mistake="the stages that hold a tied embedding keep their own parts of its gradient",
    edits=(
        Edit(
            "parallel/pipeline/tied_params.py",
            "sum_gradients_of_tied_parameters",
            "            gradient.copy_(part.view(gradient.shape))\n",
            "            if not __planted__():\n"
            "                gradient.copy_(part.view(gradient.shape))\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("not added up",),
    tensors=("embed.weight",),
    clean=("tp4",),
    job=("--shrink", "model.tie_embeddings=true"),
)
