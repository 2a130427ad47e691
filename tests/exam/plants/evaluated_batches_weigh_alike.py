from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="transformers#16716, #41898",
    mistake="each batch of an evaluation counts as if it had as many targets as the first",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.evaluate",
            "                if outcome is not None:\n",
            (
                "                if outcome is not None:\n"
                "                    usual = outcome[1] if not losses else usual\n"
                "                    if __planted__(bool((outcome[1] != usual) & (outcome[1] > 0) & (usual > 0))):\n"
                "                        outcome = outcome[0] / outcome[1] * usual, usual\n"
            ),
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("targets", "mean of means"),
    tensors=("",),
)
