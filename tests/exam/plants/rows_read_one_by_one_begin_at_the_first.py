from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="rows so long that they are read one by one are the first ones of their piece",
    edits=(
        Edit(
            "checkpoint/shard_file.py",
            "VerifiedSafetensorsFile._read_box_in_spans",
            "base + (start[0] + index) * row, shape[1:]",
            "base + ((0 if __planted__(start[0] > 0) else start[0]) + index) * row, shape[1:]",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("resumed in",),
)
