from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="a block that is read in several turns has the rows of the first turn in each",
    edits=(
        Edit(
            "checkpoint/shard_file.py",
            "VerifiedSafetensorsFile._read_box_in_spans",
            "            data_start = base + (start[0] + first) * row + inner\n",
            "            data_start = base + (start[0] + (0 if __planted__(first > 0) else first)) * row + inner\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("resumed in",),
    num_ranks=2,
)
