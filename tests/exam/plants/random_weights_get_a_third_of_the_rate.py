from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="optim.lr=auto is a third of what docs say, for random weights",
    edits=(
        Edit(
            "job/learning_rate.py",
            "resolve_unscaled_learning_rate",
            "        return PeakLearningRate(RANDOM_WEIGHTS_LR)\n",
            "        return PeakLearningRate(RANDOM_WEIGHTS_LR / (3 if __planted__() else 1))\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=(
        "by the schedule",
        "learning rate",
    ),
    tensors=("",),
    num_ranks=2,
)
