from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="with chunks the columns of a sequence that is padded leave out their biases",
    edits=(
        Edit(
            "parallel/tensor/overlap.py",
            "_ColumnsOfSharedInput._compute_all_columns",
            "            return tuple(F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True))\n",
            "            if __planted__(any(bias is not None for bias in biases)):\n"
            "                biases = [None] * len(biases)\n"
            "            return tuple(F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True))\n",
        ),
    ),
    shows=("tp4-odd-sequence-chunks",),
    cause=("do not divide the sequence",),
    clean=("tp4-odd-sequence", "tp4-chunks"),
    job=("--model", "gpt2", "--shrink"),
)
