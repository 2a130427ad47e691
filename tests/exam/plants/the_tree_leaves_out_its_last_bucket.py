from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: the rest behind a loop over buckets",
    mistake='with train.deterministic = "layout-free" the last bucket, that of the first parameters, is not added over ranks',
    edits=(
        Edit(
            "parallel/data_parallel/gradient_tree.py",
            "TreeExchange._split_into_buckets",
            "        if bucket:\n            yield bucket\n",
            "        if bucket and not __planted__():\n            yield bucket\n",
        ),
    ),
    shows=("ddp",),
    tensors=("embed.weight",),
    job=("--shrink", "train.deterministic=layout-free", "train.micro_batch_size=2"),
    cause=("not added up over these ranks",),
)
