from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="planted before in phalanx's tests",
    mistake="a recomputation drops what the next step would",
    edits=(
        Edit(
            "parallel/dropout/rng.py",
            "_ReplayDrawStateContext.__enter__",
            "            at_start.copy() if at_start else None,\n",
            "            replace(at_start, step=at_start.step + (1 if __planted__() else 0), calls=dict(at_start.calls))\n"
            "            if at_start\n"
            "            else None,\n",
        ),
    ),
    shows=("zero3-full", "ddp-every2"),
    cause=("goes wrong where it meets", "recomput", "mask"),
    tensors=("blocks.1.*",),
    clean=("zero3",),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
