from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="under ddp and tp a rank's number among the copies of its block is that in its tp group",
    edits=(
        Edit(
            "mesh/logical.py",
            "ReplicaPosition._make_shard_within_stage",
            '"replica": self.rank // share,',
            '"replica": self.rank % share if __planted__(self.num_ranks > share) else self.rank // share,',
        ),
    ),
    shows=("trainer-loss-scale",),
    cause=("checkpoint",),
)
