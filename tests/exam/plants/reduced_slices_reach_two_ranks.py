from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: shared memory, more than two ranks",
    mistake="a rank writes the slice that it has reduced to itself and to one other rank alone",
    edits=(
        Edit(
            "mesh/shared_memory/reduction.py",
            "_reduce_by_pieces",
            "        for place in places:\n",
            "        for place in places[: 2 if __planted__(len(places) > 2) else None]:\n",
        ),
    ),
    shows=("ddp",),
    blamed=(1, 2, 3),
    cause=("its part was not reduced, or is stale",),
)
