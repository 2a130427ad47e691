from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="Gemma 3 in transformers",
    mistake="an exported config.json says of each block whether the one behind it has a window",
    edits=(
        Edit(
            "checkpoint/exchange/settings.py",
            "list_attention_layer_types",
            "        if shape.is_local(layer):\n",
            "        if shape.is_local(layer + 1 if __planted__(shape.global_every > 1) else layer):\n",
        ),
    ),
    shows=("hugging-face",),
    cause=("export",),
    tensors=("",),
    num_ranks=2,
    job=("--model", "gemma3-1b", "--shrink", "model.global_every=2", "model.sliding_window=10"),
)
