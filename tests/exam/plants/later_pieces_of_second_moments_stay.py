from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading: resharding of the optimizer's state",
    mistake="of a second moment that a checkpoint holds in several pieces only the first two are read",
    edits=(
        Edit(
            "checkpoint/reading/load.py",
            "read_overlapping_blocks",
            "                staged.append((target, block.view(getattr(torch, dtype)).reshape(size)))\n",
            "                is_late = manifest.tensors[shard.name].pieces.index(piece) >= 2\n"
            '                if not __planted__(is_late and shard.name.endswith("/exp_avg_sq")):\n'
            "                    staged.append((target, block.view(getattr(torch, dtype)).reshape(size)))\n",
        ),
    ),
    shows=("trainer-zero3",),
    cause=("moment", "optimizer", "restored", "resume", "checkpoint", "exp_avg_sq"),
    clean=("ddp", "zero3"),
)
