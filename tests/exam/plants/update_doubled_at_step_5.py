from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="the update of step 5 is made twice",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.update",
            "        optimizer.step()\n",
            "        optimizer.step()\n"
            "        if __planted__(self.step == 5):\n"
            "            optimizer.step()\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("made twice",),
)
