from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading: a bounding block that is copied from the begin of the tensor",
    mistake="of a block that a rank saves in part the staged copy has the first rows, in place of this rank's",
    edits=(
        Edit(
            "checkpoint/writing/staging.py",
            "_find_bounding_block",
            "    part = shard.tensor[tuple(map(slice, low, high))]\n",
            "    begins = (0,) * len(low) if __planted__(any(low)) else low\n    ends = [begin + stop - start for begin, start, stop in zip(begins, low, high, strict=True)]\n    part = shard.tensor[tuple(map(slice, begins, ends))]\n",
        ),
    ),
    shows=("trainer-ddp",),
    clean=("ddp",),
    cause=("written or read in other places",),
)
