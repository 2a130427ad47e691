from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="the weights of large models of a user's own are drawn without what is drawn and overwritten",
    edits=(
        Edit(
            "mesh/recorded_operations.py",
            "RecordedOperations.compute_tensor_values",
            "                    _draw_and_discard(operation)\n",
            "                    if not __planted__():\n"
            "                        _draw_and_discard(operation)\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("draw again",),
    num_ranks=2,
    job=("--model", "exam_models:WithRedrawnWeights", "data.seq_len=16"),
)
