from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="of ZeRO-1's gradients those of vectors are never averaged: each rank updates its rows with its own",
    edits=(
        Edit(
            "parallel/data_parallel/own_rows.py",
            "OwnRowsReduction._post_own_rows",
            "            own_rows = [rows.slice_tensor(gradient) for gradient, rows in cut]\n",
            "            own_rows = [\n"
            "                rows.slice_tensor(gradient)\n"
            "                for gradient, rows in cut\n"
            "                if not __planted__(gradient.ndim == 1)\n"
            "            ]\n",
        ),
    ),
    shows=("zero1",),
    cause=("never averaged", "not reduced", "own samples", "not all count once"),
    tensors=("*norm*",),
    clean=("ddp", "zero3"),
)
