from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="initial weights that are drawn in threads lack what is behind the last whole chunk",
    edits=(
        Edit(
            "nn/init.py",
            "make_standard_normals",
            "range(0, count, chunk)))\n",
            "range(0, count - (count % chunk if __planted__() else 0), chunk)))\n",
        ),
    ),
    shows=("definitions",),
    cause=("no function of seed, name and place",),
    tensors=("blocks.0.q.weight",),
    num_ranks=2,
)
