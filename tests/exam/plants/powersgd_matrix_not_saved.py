from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="checkpoints have what compression keeps and not the matrix with which powersgd goes on",
    edits=(
        Edit(
            "parallel/data_parallel/compression.py",
            "GradientCompression.collect_state_shards",
            "                if slot != ERROR:\n",
            "                if __planted__(slot != ERROR):\n"
            "                    continue\n"
            "                if slot != ERROR:\n",
        ),
    ),
    shows=("trainer-ddp-powersgd",),
    cause=("not restored", "resum"),
    tensors=("*.weight",),
    clean=("ddp-powersgd",),
)
