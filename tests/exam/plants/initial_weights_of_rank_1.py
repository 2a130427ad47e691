from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="planted before in phalanx's tests",
    mistake="rank 1 draws other initial weights",
    edits=(
        Edit(
            "nn/init.py",
            "initialize_shards",
            '            _fill_with_normals(shard, rule.std, hash_to_stable_64_bits("init", seed, name))\n',
            "            drawn = seed + (1 if __planted__(rank=1) else 0)\n"
            '            _fill_with_normals(shard, rule.std, hash_to_stable_64_bits("init", drawn, name))\n',
        ),
    ),
    shows=("ddp", "zero3", "tp4"),
    cause=("initial weights depend",),
    blamed=(1,),
)
