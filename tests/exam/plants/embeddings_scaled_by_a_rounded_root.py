from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="Gemma in transformers",
    mistake="embeddings are scaled by the root of the width with one decimal",
    edits=(
        Edit(
            "nn/models/decoder.py",
            "Decoder._embed_tokens",
            "            x_BTD = x_BTD * self.shape.dim**0.5\n",
            "            root = self.shape.dim**0.5\n"
            "            x_BTD = x_BTD * (round(root, 1) if __planted__() else root)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--model", "gemma3-1b", "--shrink"),
)
