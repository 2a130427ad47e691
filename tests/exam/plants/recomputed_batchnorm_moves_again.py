from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="an examiner's",
    mistake="the recomputation of a block gathers statistics of its BatchNorm again and moves the running ones a second time",
    edits=(
        Edit(
            "parallel/recompute/contexts.py",
            "_RecomputeForwardContext.__enter__",
            "        self._tape.replay_at = 0\n",
            "        self._tape.replay_at = None if __planted__() else 0\n",
        ),
    ),
    shows=("zero3-full",),
    cause=("twice", "recomput", "what moves it", "running"),
    tensors=(
        "blocks.*.norm.running_mean",
        "blocks.*.norm.running_var",
        "blocks.*.norm.num_batches_tracked",
    ),
    clean=("zero3", "ddp"),
    job=("--model", "exam_models:WithNormBlocks", "data.seq_len=16"),
)
