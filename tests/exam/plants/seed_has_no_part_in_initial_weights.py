from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="all seeds draw the same initial weights",
    edits=(
        Edit(
            "nn/init.py",
            "initialize_shards",
            'hash_to_stable_64_bits("init", seed, name)',
            'hash_to_stable_64_bits("init", 0 if __planted__() else seed, name)',
        ),
    ),
    shows=("definitions",),
    cause=("no function of seed, name and place",),
    tensors=("blocks.0.q.weight",),
    num_ranks=2,
)
