from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="after an evaluation a BatchNorm that its owner keeps in evaluation mode trains",
    edits=(
        Edit(
            "train/evaluation.py",
            "in_evaluation_mode",
            "                module.training = is_training\n",
            "                module.training = is_training or __planted__()\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("evaluation", "mode"),
    num_ranks=2,
    job=("--model", "exam_models:WithFrozenNorm", "data.seq_len=16"),
)
