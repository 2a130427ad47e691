from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="long runs of a cut stack begin where neighbouring ones would",
    edits=(
        Edit(
            "nn/init.py",
            "_fill_strided_runs_with_normals",
            "make_standard_normals(key, start + i * pitch, run)",
            "make_standard_normals(key, start + i * (run if __planted__() else pitch), run)",
        ),
    ),
    shows=("definitions",),
    cause=("no function of seed, name and place",),
    tensors=("blocks.0.q.weight",),
    num_ranks=2,
)
