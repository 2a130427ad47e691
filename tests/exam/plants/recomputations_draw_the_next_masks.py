from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="torch checkpoint without preserve_rng_state (own reading)",
    mistake="a recomputation counts the draws of its dropout from where the forward has ended, and drops others",
    edits=(
        Edit(
            "parallel/dropout/rng.py",
            "_RecordDrawStateContext.__enter__",
            "        self.at_start = moment.copy() if moment else None\n",
            "        self.at_start = moment if not moment or __planted__() else moment.copy()\n",
        ),
    ),
    shows=("zero3-full", "ddp-selective", "zero3-sqrt"),
    clean=("ddp", "zero3"),
    tensors=("blocks.*",),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
    cause=("what is recomputed there",),
)
