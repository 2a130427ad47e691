from exam.plant import DEFAULT_JOB, Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="Megatron-LM#7452 f.7",
    mistake="rows of the last two ranks arrive in each other's place when updated weights are gathered",
    edits=(
        Edit(
            "mesh/gloo_collectives.py",
            "all_gather_rows_in_place",
            "    sources = _list_global_ranks(group)\n",
            "    sources = _list_global_ranks(group)\n"
            "    if __planted__(len(sources) == 4 and rows.ndim == 2):\n"
            "        sources[2], sources[3] = sources[3], sources[2]\n"
            "        rows[2:] = rows[2:].flip(0)\n",
        ),
    ),
    shows=("zero1", "zero3"),
    cause=("borders", "stale", "other weights", "order", "in the wrong place"),
    clean=("ddp",),
    job=DEFAULT_JOB,
)
