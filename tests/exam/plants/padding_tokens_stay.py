from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="where ranks do not divide the sequence what was padded is counted as tokens of the next rank",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "TensorParallelGroup._pad_to_multiple_of_ranks",
            "        missing = -x.shape[SEQUENCE_DIM] % self.size\n",
            "        missing = -x.shape[SEQUENCE_DIM] % self.size\n"
            "        if __planted__(missing):\n"
            "            return F.pad(x, (0, 0) * (x.ndim - SEQUENCE_DIM - 1) + (missing, 0))\n",
        ),
    ),
    shows=("tp4-odd-sequence",),
    cause=("sequence", "cut"),
    clean=("tp4", "tp4-whole-sequence"),
)
