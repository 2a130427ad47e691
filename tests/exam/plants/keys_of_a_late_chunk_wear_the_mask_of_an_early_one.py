from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="where a rank's chunks of queries and of keys have other numbers, keys are masked as those of the chunk with the queries' number",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_list_visible_blocks",
            "                    chunks.list_chunks_of_rank(owner)[to] * length,\n",
            "                    chunks.list_chunks_of_rank(owner)[at if __planted__(at != to) else to] * length,\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("chunk", "mask", "other keys", "keys of another", "zigzag"),
    tensors=("", "*.attention.*"),
    clean=("ddp", "cp4-ulysses"),
    job=("--shrink", "data.document_masks=true"),
)
