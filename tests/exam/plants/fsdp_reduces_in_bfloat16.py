from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="planted before in phalanx's tests",
    mistake="FSDP reduces gradients in bfloat16",
    edits=(
        Edit(
            "parallel/data_parallel/shard.py",
            "_build_mixed_precision_policy",
            "        return MixedPrecisionPolicy(cast_forward_inputs=False)\n",
            "        low_type = torch.bfloat16 if __planted__() else None\n"
            "        return MixedPrecisionPolicy(cast_forward_inputs=False, reduce_dtype=low_type)\n",
        ),
    ),
    shows=("zero2", "zero3"),
    cause=("bfloat16",),
    clean=("ddp", "zero1"),
)
