from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading",
    mistake="a dropout mask of several chunks repeats the bits of the first one",
    edits=(
        Edit(
            "mesh/counter_rng.py",
            "_fill_lines_with_keep_mask",
            "        if start:\n",
            "        if start and not __planted__():\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("masks",),
    tensors=("drop", "*drop*"),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
