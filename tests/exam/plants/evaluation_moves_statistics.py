from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="torchtitan 24e9105 (#1758)",
    mistake="an evaluation leaves other running statistics",
    edits=(
        Edit(
            "train/evaluation.py",
            "in_evaluation_mode",
            "                buffer.copy_(value)\n",
            "                buffer.copy_(value + 1 if __planted__(buffer.is_floating_point()) else value)\n",
        ),
    ),
    shows=("trainer-zero3",),
    cause=("evaluation", "buffer"),
    job=("--model", "exam_models:WithBatchNorm", "data.seq_len=16"),
)
