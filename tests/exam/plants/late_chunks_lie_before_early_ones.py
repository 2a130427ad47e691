from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="a rank has its late chunk before its early one, and attends to its own keys as if they lay in the sequence's order",
    edits=(
        Edit(
            "parallel/context/chunks.py",
            "SequenceChunksOfRanks.list_chunks_of_rank",
            "            return (rank, 2 * self.size - 1 - rank)\n",
            "            if __planted__():\n"
            "                return (2 * self.size - 1 - rank, rank)\n"
            "            return (rank, 2 * self.size - 1 - rank)\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=(
        "chunk",
        "zigzag",
        "order",
        "causal",
        "mask",
        "later tokens",
        "come after",
        "future",
    ),
    tensors=("", "*"),
    clean=("ddp", "cp4-ulysses", "cp4-one-run"),
)
