from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="keys and values that several ranks of tp hold count on each of them in the norm",
    edits=(
        Edit(
            "parallel/gradients.py",
            "list_local_blocks_with_replica_counts",
            "    counts = {shard.num_replicas * box.num_replicas for box in shard.boxes}\n",
            "    counts = {shard.num_replicas * (1 if __planted__() else box.num_replicas) for box in shard.boxes}\n",
        ),
    ),
    shows=("tp4",),
    cause=("more than once",),
    tensors=("",),
    job=("--shrink", "model.num_heads=4", "model.num_kv_heads=2"),
)
