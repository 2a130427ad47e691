from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="pytorch#194457",
    mistake="rows beyond the ranks' even share are updated by nobody",
    edits=(
        Edit(
            "parallel/data_parallel/zero1.py",
            "find_rows_of_rank",
            "    chunk = -(-size // num_ranks)\n",
            "    chunk = size // num_ranks if __planted__(size % num_ranks and size > num_ranks) else -(-size // num_ranks)\n",
        ),
    ),
    shows=("zero1", "hsdp2x2-zero1"),
    cause=("borders", "stale", "not updated", "update"),
    tensors=("embed.weight", "head.weight", "*.ffn.*"),
    clean=("zero2",),
)
