from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="the base of rotary positions under NTK scaling is multiplied by the factor, without its exponent",
    edits=(
        Edit(
            "nn/rotary.py",
            "_compute_rotary_base",
            "    return shape.rope_theta * stretch\n",
            "    return shape.rope_theta * (shape.rope_factor if __planted__() else stretch)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn", "rotary"),
    num_ranks=2,
    job=("--shrink", "model.rope_scaling=ntk", "model.rope_factor=4"),
)
