from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="pytorch#194457",
    mistake="a stored piece that begins inside of a block is copied to its begin",
    edits=(
        Edit(
            "checkpoint/reading/load.py",
            "_slice_local_tensor",
            "    return build_box_slices(local_start, size)\n",
            "    if __planted__(local_start != tuple(box.local_offset)):\n"
            "        local_start = tuple(box.local_offset)\n"
            "    return build_box_slices(local_start, size)\n",
        ),
    ),
    shows=("trainer-tp2-zero3", "trainer-pp2-zero3-1f1b"),
    cause=("resum", "checkpoint", "restor"),
)
