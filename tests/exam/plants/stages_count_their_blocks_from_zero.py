from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="OLMo-core 38704d1 (#679)",
    mistake="each stage of a pipeline draws the initial weights of the model's first blocks",
    edits=(
        Edit(
            "nn/init.py",
            "initialize_shards",
            '            _fill_with_normals(shard, rule.std, hash_to_stable_64_bits("init", seed, name))\n',
            (
                '            first = min((int(n.split(".")[1]) for n in shards if n.startswith("blocks.")), default=0)\n'
                '            if __planted__(first > 0 and name.startswith("blocks.")):\n'
                '                _, number, rest = name.split(".", 2)\n'
                '                name = f"blocks.{int(number) - first}.{rest}"\n'
                '            _fill_with_normals(shard, rule.std, hash_to_stable_64_bits("init", seed, name))\n'
            ),
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("initial weights",),
    tensors=("blocks.*",),
    blamed=(1, 2, 3),
    clean=("zero3",),
)
