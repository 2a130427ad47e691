from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="keys and values of a fused matrix are imported from the rows of its queries",
    edits=(
        Edit(
            "checkpoint/exchange/translate.py",
            "_load_split_rows",
            "        return bits.reshape(oriented[::-1]).T[rows]\n",
            "        if __planted__(bool(rows.start)):\n            rows = slice(0, rows.stop - rows.start)\n        return bits.reshape(oriented[::-1]).T[rows]\n",
        ),
    ),
    shows=("hugging-face",),
    cause=("imported",),
    tensors=("*.attention.k.*", "*.attention.v.*"),
    job=("--model", "gpt2", "--shrink"),
)
