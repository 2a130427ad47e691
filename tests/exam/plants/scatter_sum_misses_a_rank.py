from exam.plant import DEFAULT_JOB, Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="planted before in phalanx's tests",
    mistake="in the reduce-scatter of gradients what rank 1 has for rank 2 counts for nothing",
    edits=(
        Edit(
            "mesh/gloo_collectives.py",
            "reduce_scatter_rows",
            "    works = []\n    for row, target",
            "    if __planted__(len(rows) == 4, rank=1):\n"
            "        rows[2].zero_()\n"
            "    works = []\n    for row, target",
        ),
    ),
    shows=("zero2", "zero3"),
    cause=("rank 2", "not reduced"),
    blamed=(2,),
    clean=("ddp", "tp4"),
    job=DEFAULT_JOB,
)
