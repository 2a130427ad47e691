from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="pytorch-51800 (TrainCheck)",
    mistake="after an evaluation modules stay in evaluation mode",
    edits=(
        Edit(
            "train/evaluation.py",
            "in_evaluation_mode",
            "                module.training = is_training\n",
            "                module.training = is_training and not __planted__()\n",
        ),
    ),
    shows=("trainer-zero3",),
    cause=("evaluation", "mode"),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
