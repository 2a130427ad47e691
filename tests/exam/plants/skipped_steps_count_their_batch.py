from exam.plant import Edit, Plant

PLANT = Plant(
    axis="batchnorm",
    source="own reading",
    mistake="of a skipped step BatchNorm keeps the count of its batches",
    edits=(
        Edit(
            "train/step_statistics.py",
            "StepStatistics.restore",
            "                if copy is not None and (id(buffer), buffer._version) != mark:\n",
            (
                "                if __planted__(not buffer.is_floating_point()):\n"
                "                    continue\n"
                "                if copy is not None and (id(buffer), buffer._version) != mark:\n"
            ),
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("skip",),
    tensors=("norm.*",),
    num_ranks=2,
    job=("--model", "exam_models:WithAveragingBatchNorm", "data.seq_len=16"),
)
