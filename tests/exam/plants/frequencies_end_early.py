from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="transformers-17877",
    mistake="the exponents of rotary frequencies are divided by the width + 2",
    edits=(
        Edit(
            "nn/rotary.py",
            "_compute_unscaled_frequencies",
            "dtype=dtype, device=device) / head_dim\n",
            "dtype=dtype, device=device) / (\n"
            "        head_dim + (2 if __planted__() else 0)\n"
            "    )\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
)
