from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="an exported config.json does not say how long sequences the model was trained on",
    edits=(
        Edit(
            "checkpoint/exchange/settings.py",
            "_build_family_config",
            "        length = max(max_positions, int(",
            "        length = max(0 if __planted__() else max_positions, int(",
        ),
    ),
    shows=("hugging-face",),
    cause=("max_position_embeddings",),
    tensors=("",),
    num_ranks=2,
)
