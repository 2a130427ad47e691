from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="the third chunk of an input's gradient is the second's",
    edits=(
        Edit(
            "parallel/tensor/overlap.py",
            "_ColumnsOfGatheredInputFunction.backward",
            "            product = _sum_input_gradients([g[:, :, rows] for g in by_rank], weights)\n",
            "            fresh = _sum_input_gradients([g[:, :, rows] for g in by_rank], weights)\n"
            "            if __planted__(len(parts) == 2):\n"
            "                fresh[:, :, : product.shape[2]] = product\n"
            "            product = fresh\n",
        ),
    ),
    shows=("tp4-chunks",),
    cause=("chunk",),
    tensors=("blocks.1.ffn_norm.weight",),
    clean=("tp4",),
)
