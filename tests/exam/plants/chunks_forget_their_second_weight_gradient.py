from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="Megatron-LM f9e6b94 (!3645)",
    mistake="of a row in chunks only the first chunk has a part in the weight's gradient",
    edits=(
        Edit(
            "parallel/tensor/overlap.py",
            "_ChunkedRowReduceScatterFunction.backward",
            "            grad_weight += _flatten_tokens(gathered).T @ _flatten_tokens(by_rank[:, :, rows])\n",
            "            if not __planted__(rows.start > 0):\n"
            "                grad_weight += _flatten_tokens(gathered).T @ _flatten_tokens(by_rank[:, :, rows])\n",
        ),
    ),
    shows=("tp4-chunks",),
    cause=("a chunk of the sequence has another's gradient",),
    tensors=("*.o.weight", "*.down.weight"),
    clean=("tp4",),
)
