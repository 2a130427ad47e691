from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="OLMo-core 7e14a68",
    mistake="a window of w holds w + 1 tokens",
    edits=(
        Edit(
            "nn/attention.py",
            "make_attention_mask",
            "        keep = keep.triu(1 - window).tril(window - 1)\n",
            "        keep = keep.triu(1 - window - (1 if __planted__() else 0)).tril(window - 1)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--shrink", "model.sliding_window=10"),
)
