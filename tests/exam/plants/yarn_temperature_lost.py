from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="DeepSeek-V2's code",
    mistake="queries of latent attention lack YaRN's temperature",
    edits=(
        Edit(
            "nn/latent_attention.py",
            "LatentAttention._project_queries",
            "        if self.query_scale == 1:\n",
            "        if self.query_scale == 1 or __planted__():\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--model", "deepseek-v2-lite", "--shrink"),
)
