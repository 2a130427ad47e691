from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="verify's own exam",
    mistake="in bf16 norms multiply by 1.1 times their weight, in one process and in all layouts",
    edits=(
        Edit(
            "nn/norms.py",
            "RMSNorm.forward",
            "        return F.rms_norm(",
            "        if __planted__(x.dtype == torch.bfloat16):\n"
            "            weight = weight * 1.1\n"
            "        return F.rms_norm(",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("the narrow type is further",),
    num_ranks=2,
    job=("--shrink", "precision.compute=bf16"),
)
