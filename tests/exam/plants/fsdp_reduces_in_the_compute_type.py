from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="where a job computes in bf16 FSDP reduces gradients in bf16, too",
    edits=(
        Edit(
            "parallel/data_parallel/shard.py",
            "_build_mixed_precision_policy",
            "    return MixedPrecisionPolicy(\n"
            "        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs\n"
            "    )\n",
            "    reduce_dtype = compute_dtype if __planted__() else torch.float32\n"
            "    return MixedPrecisionPolicy(\n"
            "        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=cast_inputs\n"
            "    )\n",
        ),
    ),
    shows=("zero2", "zero3"),
    cause=("bfloat16",),
    clean=("ddp", "zero1"),
    num_ranks=2,
    job=("--shrink", "precision.compute=bf16"),
)
