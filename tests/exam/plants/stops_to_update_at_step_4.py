from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="forum-84911 (TrainCheck)",
    mistake="from step 4 on nothing is updated",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.update",
            "        optimizer.step()\n",
            "        if not __planted__(self.step >= 4):\n            optimizer.step()\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("this update were left out",),
)
