from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading: repeat in place of repeat_interleave for grouped queries",
    mistake="where a kernel wants a key head for each query head the heads of keys are repeated one round after another: queries meet other groups' keys",
    edits=(
        Edit(
            "mesh/attend.py",
            "repeat_key_value_heads",
            "    return x_BKSE.repeat_interleave(groups, dim=1)\n",
            "    if __planted__(x_BKSE.shape[1] > 1):\n        return x_BKSE.repeat(1, groups, 1, 1)\n    return x_BKSE.repeat_interleave(groups, dim=1)\n",
        ),
    ),
    shows=("cp4-all-gather", "ddp-cp2-all-gather"),
    clean=("ddp", "cp4"),
    tensors=("", "*"),
    job=("--shrink", "model.num_heads=4", "model.num_kv_heads=2"),
    cause=("serves other queries",),
)
