from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading: resume in another layout",
    mistake="where a piece of a checkpoint and a rank's block overlap in part, columns are taken and written from the first one on",
    edits=(
        Edit(
            "checkpoint/reading/full_tensors.py",
            "subtract_offsets",
            "    return tuple(position - origin for position, origin in zip(start, offset, strict=True))\n",
            "    counted = [position - origin for position, origin in zip(start, offset, strict=True)]\n    if __planted__(any(counted[1:])):\n        counted[1:] = [0] * len(counted[1:])\n    return tuple(counted)\n",
        ),
    ),
    shows=("trainer-tp2-zero3",),
    clean=("zero3-tp2",),
    cause=("written or read in other places",),
)
