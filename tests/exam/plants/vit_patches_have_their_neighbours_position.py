from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="each token gets the position of the one before it",
    edits=(
        Edit(
            "nn/models/vit.py",
            "VisionTransformer._embed_patches",
            "x_BTD = x_BTD + self.embed_positions\n",
            "x_BTD = x_BTD + self.embed_positions.roll(1 if __planted__() else 0, 0)\n",
        ),
    ),
    shows=("plain", "hugging-face"),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--model", "small-vit", "--shrink"),
)
