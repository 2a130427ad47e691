from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading: places in memory that overlap",
    mistake="in the copy that a save in the background writes, what comes after a single number overwrites it",
    edits=(
        Edit(
            "checkpoint/writing/staging.py",
            "HostStagingMemory.copy_shards",
            "            position += _round_up_to_alignment(num_bytes)\n",
            "            if not __planted__(source.ndim == 0):\n"
            "                position += _round_up_to_alignment(num_bytes)\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("background", "checkpoint", "resume", "restored", "saved", "step count", "counter"),
    clean=("ddp", "zero3"),
)
