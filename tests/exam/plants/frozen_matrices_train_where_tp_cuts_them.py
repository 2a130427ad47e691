from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="an examiner's",
    mistake="what tp leaves of a frozen matrix is trained, beside the adapters that were to be",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "ModuleSharder._replace_by_parameter_shard",
            "requires_grad=parameter.requires_grad)",
            "requires_grad=parameter.requires_grad or __planted__())",
        ),
    ),
    shows=("tp2",),
    cause=("frozen", "is trained", "are trained", "requires_grad"),
    tensors=("blocks.*.ffn.*",),
    clean=("ddp", "zero3"),
    num_ranks=2,
    job=("--model", "exam_models:WithFrozenColumns", "data.seq_len=16"),
)
