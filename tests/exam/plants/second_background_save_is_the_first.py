from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="torch's cached staging of DCP",
    mistake="the second save in the background writes the copy that the first one made",
    edits=(
        Edit(
            "checkpoint/writing/staging.py",
            "HostStagingMemory.copy_shards",
            "            target.copy_(source, non_blocking=True)\n",
            "            copied = vars(self).setdefault('_copied', set())\n            if not __planted__((name, position) in copied):\n                target.copy_(source, non_blocking=True)\n            copied.add((name, position))\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("second checkpoint that is saved in the background",),
    num_ranks=2,
)
