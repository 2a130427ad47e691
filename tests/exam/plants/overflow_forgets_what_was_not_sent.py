from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="of a gradient that is not finite what was kept before is set to zero",
    edits=(
        Edit(
            "parallel/data_parallel/compression.py",
            "GradientCompression.average_gradients_over_ranks",
            "            error.copy_(torch.where(rest.isfinite().all(), rest / scale, error))\n",
            "            kept = error\n"
            "            if __planted__(not bool(rest.isfinite().all())):\n"
            "                kept = torch.zeros_like(error)\n"
            "            error.copy_(torch.where(rest.isfinite().all(), rest / scale, kept))\n",
        ),
    ),
    shows=("ddp-int8", "ddp-topk", "ddp-powersgd"),
    cause=("what was not sent is lost",),
    clean=("ddp-bf16",),
)
