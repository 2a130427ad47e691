from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="own reading: a tape that is not moved on",
    mistake="in a recomputation the second BatchNorm of a block normalises by the statistics of the first",
    edits=(
        Edit(
            "parallel/batchnorm/layer.py",
            "RecordedBatchStatistics.take_next_statistics",
            "        return self.played[self.replay_at - 1]\n",
            "        return self.played[0 if __planted__(self.replay_at > 1) else self.replay_at - 1]\n",
        ),
    ),
    shows=("zero3-full", "ddp-selective"),
    clean=("ddp", "zero3"),
    tensors=("blocks.*", "embed.weight"),
    job=("--model", "exam_models:WithTwoNorms", "data.seq_len=16"),
    cause=("what is recomputed there",),
)
