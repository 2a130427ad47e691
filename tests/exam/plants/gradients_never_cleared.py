from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="stackoverflow-60335387 (TrainCheck)",
    mistake="gradients of a step are added to those of the next",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "            optimizer.zero_grad(set_to_none=True)\n",
            "            if not __planted__():\n"
            "                optimizer.zero_grad(set_to_none=True)\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("left in gradients", "cleared", "step before"),
)
