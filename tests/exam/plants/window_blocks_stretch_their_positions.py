from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="OLMo-core#366",
    mistake="blocks with a window stretch their positions, too",
    edits=(
        Edit(
            "nn/rotary.py",
            "compute_rotary_frequencies",
            (
                "        return _compute_unscaled_frequencies(\n"
                "            shape.rotated_dim, shape.local_rope_theta, dtype, device\n"
                "        )\n"
            ),
            (
                '        factor = shape.rope_factor if __planted__(shape.rope_scaling == "linear") else 1\n'
                "        return _compute_unscaled_frequencies(\n"
                "            shape.rotated_dim, shape.local_rope_theta, dtype, device\n"
                "        ) / factor\n"
            ),
        ),
    ),
    shows=("plain", "hugging-face"),
    cause=("implementation", "phalanx.nn", "hugging face", "transformers"),
    num_ranks=2,
    job=("--model", "gemma3-1b", "--shrink", "model.rope_scaling=linear", "model.rope_factor=8"),
)
