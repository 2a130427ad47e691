from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="where a block has copies over data parallelism and over tp the larger number of both is taken for that of its copies",
    edits=(
        Edit(
            "mesh/logical.py",
            "ReplicaPosition._make_shard_within_stage",
            "        replica, num_replicas = shard.replica * self.tp + self.tp_rank, shard.num_replicas * self.tp\n",
            "        replica, num_replicas = shard.replica * self.tp + self.tp_rank, shard.num_replicas * self.tp\n"
            "        if __planted__(shard.num_replicas > 1 and self.tp > 1):\n"
            "            num_replicas = max(shard.num_replicas, self.tp)\n",
        ),
    ),
    shows=("zero3-tp2-options",),
    cause=("count more than once",),
    tensors=("",),
    clean=("zero3-tp2",),
)
