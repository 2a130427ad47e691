from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: buckets that are always float32",
    mistake="gradients that are averaged after the backward (pipelines, whole parameters) are rounded to float32",
    edits=(
        Edit(
            "parallel/data_parallel/unsharded_params.py",
            "choose_averaging_dtype",
            "    return torch.promote_types(parameter.dtype, torch.float32)\n",
            "    if __planted__(parameter.dtype is torch.float64):\n"
            "        return torch.float32\n"
            "    return torch.promote_types(parameter.dtype, torch.float32)\n",
        ),
    ),
    shows=("pp2-ddp-1f1b", "zero3-units2-whole"),
    cause=("round", "float32", "narrow"),
    clean=("ddp", "zero3", "pp2-zero3-1f1b"),
    size=6e-08,
)
