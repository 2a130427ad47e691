from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="planted before in phalanx's tests",
    mistake="where weights are sharded norms and embeddings decay, too",
    edits=(
        Edit(
            "optim/groups.py",
            "WeightDecayGroups.with_decay",
            "            if parameters or self.keeps_empty:\n",
            '            is_sharded = any(hasattr(p, "to_local") for p in self.undecayed)\n'
            "            decay = weight_decay if __planted__(is_sharded) else decay\n"
            "            if parameters or self.keeps_empty:\n",
        ),
    ),
    shows=("zero1", "zero3"),
    cause=("as if this tensor decayed",),
    tensors=("embed.weight", "*norm.weight", "*.bias"),
    clean=("ddp",),
)
