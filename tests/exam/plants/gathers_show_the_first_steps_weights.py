from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="TransformerEngine: weights kept from the first microbatch on (own reading)",
    mistake="what a rank shows of its own shard in a gather is a copy of the first step's",
    edits=(
        Edit(
            "parallel/data_parallel/shared_shards.py",
            "UnchangedShards.post_gather",
            "            shard = parameter._sharded_param_data\n",
            '            shard = parameter._sharded_param_data\n            if __planted__():\n                shard = vars(parameter).setdefault("first_shard", shard.clone())\n',
        ),
    ),
    shows=("zero3", "zero2"),
    clean=("ddp", "zero1"),
    tensors=("", "*"),
    cause=("a stale copy",),
)
