from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="a block of int8 whose scale is not finite arrives as zeros: the step is applied",
    edits=(
        Edit(
            "parallel/hooks/int8.py",
            "_dequantise_int8_blocks",
            "    return torch.where(wide.isfinite(), numbers.to(dtype) * wide, torch.nan)\n",
            "    lost = 0.0 if __planted__(not bool(wide.isfinite().all())) else torch.nan\n"
            "    return torch.where(wide.isfinite(), numbers.to(dtype) * wide, lost)\n",
        ),
    ),
    shows=("ddp-int8",),
    cause=("overflow is not seen",),
    clean=("ddp-topk",),
)
