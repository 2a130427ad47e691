from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="in long sequences the last block of queries of a chunk attends to one key less",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_list_visible_blocks_of_chunk_pair",
            "        first_key, end = max(first_key, starts[1]), min(end, starts[1] + length)\n",
            "        first_key, end = max(first_key, starts[1]), min(end, starts[1] + length)\n"
            "        end -= 1 if __planted__(last == starts[0] + length and end - first_key > 1) else 0\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("window", "mask"),
    tensors=("",),
    job=("--shrink", "data.document_masks=true", "data.seq_len=8192"),
)
