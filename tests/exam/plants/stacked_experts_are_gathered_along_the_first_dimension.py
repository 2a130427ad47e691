from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: shard_placement_fn of experts (FSDP2)",
    mistake="a stack of experts that ZeRO cuts along another dimension is put together along the first",
    edits=(
        Edit(
            "parallel/data_parallel/shared_shards.py",
            "_list_rows",
            "    if dim == 0:\n",
            "    if dim == 0 or __planted__(dim != 0):\n",
        ),
    ),
    shows=("zero3", "zero2"),
    clean=("ddp",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=6", "model.balance_loss=0.05"),
    cause=("what is gathered of a stack is put together in another order",),
)
