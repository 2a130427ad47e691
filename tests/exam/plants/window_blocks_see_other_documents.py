from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="attention with one mask leaves out the documents where it has a window",
    edits=(
        Edit(
            "nn/attention.py",
            "make_attention_mask",
            "    if document_ids_BT is not None:\n",
            "    if document_ids_BT is not None and not __planted__(0 < window < num_tokens):\n",
        ),
    ),
    shows=("plain",),
    cause=("implementation", "phalanx.nn"),
    num_ranks=2,
    job=("--shrink", "data.document_masks=true", "model.sliding_window=10"),
)
