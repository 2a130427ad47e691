from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="of a block that replicas write in parts each writes its first rows",
    edits=(
        Edit(
            "checkpoint/writing/write.py",
            "_cut_box_to_rows",
            "(box.local_offset[0] + start, *box.local_offset[1:])",
            "(box.local_offset[0] + (0 if __planted__(start > 0) else start), *box.local_offset[1:])",
        ),
    ),
    shows=("trainer-ddp", "trainer-hsdp2x2-zero3"),
    cause=("restored from the checkpoint",),
    tensors=("embed*", "head*"),
)
