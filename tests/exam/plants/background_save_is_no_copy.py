from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="what a thread writes in the background is the state itself, which training goes on to change",
    edits=(
        Edit(
            "checkpoint/writing/staging.py",
            "HostStagingMemory.copy_shards",
            "            target.copy_(source, non_blocking=True)\n",
            (
                "            target.copy_(source, non_blocking=True)\n"
                "            if __planted__():\n"
                "                target = source\n"
            ),
        ),
    ),
    shows=("trainer-zero3", "trainer-ddp"),
    cause=("copy",),
)
