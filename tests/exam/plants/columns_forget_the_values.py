from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="of queries, keys and values in chunks the values owe nothing to their input",
    edits=(
        Edit(
            "parallel/tensor/overlap.py",
            "_sum_input_gradients",
            "        total += grad @ weight\n",
            "        if not __planted__(len(weights) == 3 and weight is weights[-1]):\n"
            "            total += grad @ weight\n",
        ),
    ),
    shows=("tp4-chunks",),
    cause=(
        "added up",
        "added them up",
        "not summed",
        "nobody sum",
        "lacks a sum",
        "missing sum",
        "backward",
    ),
    tensors=("blocks.1.attention_norm.weight",),
    clean=("tp4",),
)
