from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: DDP's find_unused_parameters together with views of buckets (pytorch)",
    mistake="microbatches add up in DDP's buckets although parameters may be unused: their gradient is zero in place of none, and they decay",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "accumulates_in_buckets",
            "    return plan.num_microbatches > 1 and not may_lack_gradients\n",
            '    return plan.num_microbatches > 1 and (\n        not may_lack_gradients or __planted__(options.unused_parameters == "allow")\n    )\n',
        ),
    ),
    shows=("ddp-unused-offload-optimizer",),
    clean=("zero3",),
    tensors=("unused.weight", "unused.bias"),
    job=("--model", "exam_models:WithUnusedLayer", "data.seq_len=16"),
    cause=("here it is updated",),
)
