from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="where there are two axes of data parallelism the group of all its ranks is that of one axis",
    edits=(
        Edit(
            "mesh/mesh.py",
            "Mesh.data_parallel_group",
            "        if self.layout.dp_replicate == 1:\n",
            "        if self.layout.dp_replicate == 1 or __planted__():\n",
        ),
    ),
    shows=("hsdp2x2-zero1", "ddp-cp2"),
    cause=(
        "never averaged",
        "not reduced",
        "not averaged",
        "were not reduced",
        "dp_replicate",
        "copies of",
        "between copies",
        "replica",
    ),
    clean=("ddp", "zero1", "zero3"),
)
