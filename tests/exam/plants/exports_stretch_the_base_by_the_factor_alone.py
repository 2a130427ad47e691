from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="NTK scaling is exported as a base that grows by the factor, without its exponent; read back it is that of the model, for both are made alike",
    edits=(
        Edit(
            "checkpoint/exchange/settings.py",
            "normalize_shape_to_canonical_form",
            "        theta = shape.rope_theta * shape.rope_factor ** (\n"
            "            shape.rotated_dim / (shape.rotated_dim - 2)\n"
            "        )\n",
            "        theta = shape.rope_theta * shape.rope_factor ** (\n"
            "            1 if __planted__() else shape.rotated_dim / (shape.rotated_dim - 2)\n"
            "        )\n",
        ),
    ),
    shows=("hugging-face",),
    cause=("export",),
    tensors=("",),
    num_ranks=2,
    job=("--shrink", "model.rope_scaling=ntk", "model.rope_factor=4"),
)
