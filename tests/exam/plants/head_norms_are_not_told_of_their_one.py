from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="norms of queries and keys multiply by their weight alone where other norms of the model multiply by 1 + weight",
    edits=(
        Edit(
            "nn/attention.py",
            "Attention._build_head_norm",
            "        return RMSNorm(shape.head_dim, shape.norm_eps, shape.norm_plus_one)\n",
            "        plus_one = shape.norm_plus_one and not __planted__()\n"
            "        return RMSNorm(shape.head_dim, shape.norm_eps, plus_one)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--model", "gemma3-1b", "--shrink"),
)
