from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="pytorch#194457",
    mistake="borders of uneven shards are taken from the floor of size / ranks",
    edits=(
        Edit(
            "mesh/logical.py",
            "make_logical_shard",
            "    boxes: tuple[Box, ...] = ()\n",
            "    if mesh.ndim == 1 and size and tensor.shape[0] % mesh.size() and size[0] != tensor.shape[0]:\n"
            "        floor = mesh.get_local_rank() * (tensor.shape[0] // mesh.size())\n"
            "        offset = (floor, *offset[1:]) if __planted__() else offset\n"
            "    boxes: tuple[Box, ...] = ()\n",
        ),
    ),
    shows=("zero2", "zero3"),
    cause=("borders",),
    clean=("ddp",),
)
