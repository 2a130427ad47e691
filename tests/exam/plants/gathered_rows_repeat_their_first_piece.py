from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="a rank that copies another one's row in pieces copies the first piece again and again",
    edits=(
        Edit(
            "mesh/shared_memory/in_place.py",
            "_copy_rows",
            "            at += num_bytes\n",
            "            at += 0 if __planted__(piece.numel() < each.rows[rank].numel()) else num_bytes\n",
        ),
    ),
    shows=("zero3", "zero1"),
    cause=("gather", "stale", "other weights", "other values", "elsewhere", "border", "replica"),
)
