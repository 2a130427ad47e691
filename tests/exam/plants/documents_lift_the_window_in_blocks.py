from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading: a window and documents together",
    mistake="attention in blocks of queries leaves out the window where there are documents",
    edits=(
        Edit(
            "nn/attention.py",
            "AttentionCore.forward",
            "                q_BHTE, k_BKTE, v_BKTE, document_ids_BT, window=window, is_causal=is_causal\n",
            "                q_BHTE,\n                k_BKTE,\n                v_BKTE,\n                document_ids_BT,\n                window=0 if __planted__(window > 0 and document_ids_BT is not None) else window,\n                is_causal=is_causal,\n",
        ),
    ),
    shows=("ddp", "zero3"),
    clean=("cp4",),
    tensors=("", "*"),
    job=("--shrink", "data.document_masks=true", "model.sliding_window=10"),
    cause=("the window is dropped",),
)
