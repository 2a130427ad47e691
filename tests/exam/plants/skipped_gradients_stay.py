from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="stackoverflow-67180955 (TrainCheck)",
    mistake="gradients of a skipped step are added to those of the next",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "            optimizer.zero_grad(set_to_none=True)\n",
            "            if not __planted__(skipped is not None):\n"
            "                optimizer.zero_grad(set_to_none=True)\n",
        ),
    ),
    shows=("trainer-zero3",),
    cause=("skip", "left in gradients"),
)
