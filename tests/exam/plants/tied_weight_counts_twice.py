from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="planted before in phalanx's tests",
    mistake="a tied embedding counts in the norm once for each stage",
    edits=(
        Edit(
            "mesh/logical.py",
            "ReplicaPosition.shard",
            "            num_replicas=how_many * shard.num_replicas,\n",
            "            num_replicas=(1 if __planted__(how_many > 1) else how_many) * shard.num_replicas,\n",
        ),
    ),
    shows=("pp4-1f1b",),
    cause=("counted twice",),
    tensors=("",),
    clean=("tp4",),
    job=("--shrink", "model.tie_embeddings=true"),
)
