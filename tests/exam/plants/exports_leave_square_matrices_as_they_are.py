from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="matrices of a Conv1D are exported untransposed where no shape tells",
    edits=(
        Edit(
            "checkpoint/exchange/translate.py",
            "_merge_phalanx_tensors",
            "        if rule.transposed:\n",
            "        if rule.transposed and not __planted__(merged.shape == merged.T.shape):\n",
        ),
    ),
    shows=("hugging-face",),
    cause=("exported",),
    tensors=("",),
    job=("--model", "gpt2", "--shrink"),
)
