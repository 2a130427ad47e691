from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="a held-out source without targets keeps its weight: the loss is too small",
    edits=(
        Edit(
            "train/evaluation.py",
            "compute_weighted_mean_loss",
            "total = sum(weights[source] for source in losses)",
            "total = sum(weights[source] for source in (weights if __planted__() else losses))",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("the evaluation does not give the loss",),
    tensors=("",),
    num_ranks=2,
)
