from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading: skipped steps x BatchNorm",
    mistake="which buffers steps move is never noted: a step that is skipped later leaves its running statistics",
    edits=(
        Edit(
            "train/step_statistics.py",
            "StepStatistics.hold",
            "                    self._moving.add(index)\n",
            "                    if not __planted__():\n                        self._moving.add(index)\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    clean=("ddp",),
    tensors=("norm.*",),
    num_ranks=2,
    job=("--model", "exam_models:WithBatchNorm", "data.seq_len=16"),
    cause=("a skipped step leaves",),
)
