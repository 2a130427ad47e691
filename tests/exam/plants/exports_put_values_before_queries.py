from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="queries, keys and values of a fused matrix are exported in the other order",
    edits=(
        Edit(
            "checkpoint/exchange/translate.py",
            "_merge_phalanx_tensors",
            "            merged = np.concatenate([reader.load(name) for name in our_names])\n",
            "            order = -1 if __planted__() else 1\n            merged = np.concatenate([reader.load(name) for name in our_names[::order]])\n",
        ),
    ),
    shows=("hugging-face",),
    cause=("exported",),
    tensors=("",),
    job=("--model", "gpt2", "--shrink"),
)
