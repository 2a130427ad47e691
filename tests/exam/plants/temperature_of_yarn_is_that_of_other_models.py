from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="YaRN's temperature is made without the model's own factor of it",
    edits=(
        Edit(
            "nn/rotary.py",
            "compute_yarn_factor",
            "    return 0.1 * shape.rope_mscale * math.log(shape.rope_factor) + 1\n",
            "    own_factor = 1.0 if __planted__() else shape.rope_mscale\n"
            "    return 0.1 * own_factor * math.log(shape.rope_factor) + 1\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn", "temperature", "yarn"),
    tensors=("", "*"),
    job=("--model", "deepseek-v2-lite", "--shrink"),
)
