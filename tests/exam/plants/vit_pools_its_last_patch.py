from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="the last patch is pooled instead of the class token",
    edits=(
        Edit(
            "nn/models/vit.py",
            "VisionTransformer.forward",
            "x_BTD[:, 0].contiguous()",
            "x_BTD[:, -1 if __planted__() else 0].contiguous()",
        ),
    ),
    shows=("plain", "hugging-face"),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--model", "small-vit", "--shrink"),
)
