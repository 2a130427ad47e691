from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="what exports read of a checkpoint of several ranks lies at the begin of each tensor",
    edits=(
        Edit(
            "checkpoint/reading/full_tensors.py",
            "FullTensorReader._load_box_of_tensor",
            "            in_box = subtract_offsets(start, offset)\n",
            "            in_box = subtract_offsets(start, piece.offset if __planted__(any(piece.offset)) else offset)\n",
        ),
    ),
    shows=("trainer-zero3", "trainer-tp2"),
    cause=("an export of the run",),
    num_ranks=2,
)
