from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="large blocks have no digest, and a save links the file that an earlier one has of them",
    edits=(
        Edit(
            "checkpoint/writing/incremental.py",
            "_hash_block_identity",
            "        xxhash.xxh3_128_hexdigest(block.load().data),\n",
            "        xxhash.xxh3_128_hexdigest(block.load().data)\n"
            "        if not __planted__(block.num_bytes >= get_block_sizes().reusable_block_bytes)\n"
            '        else "",\n',
        ),
        Edit(
            "checkpoint/writing/incremental.py",
            "ReusableCheckpoint.index_pieces_by_file",
            "                if not piece.xxh3_128:\n",
            "                if not piece.xxh3_128 and not __planted__():\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("a file was linked",),
    num_ranks=2,
)
