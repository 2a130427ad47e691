from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="an examiner's",
    mistake="layers that have the batch in their second dimension drop as if tokens were the samples",
    edits=(
        Edit(
            "parallel/dropout/transform.py",
            "find_layers_with_batch_in_dim_1",
            "        if is_transformer and not part.self_attn.batch_first:\n",
            "        if is_transformer and not part.self_attn.batch_first and not __planted__():\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("mask",),
    tensors=("blocks.0.dropout*",),
    job=("--model", "exam_models:WithTokensFirst", "data.seq_len=16"),
)
