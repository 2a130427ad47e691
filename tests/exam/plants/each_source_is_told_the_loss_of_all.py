from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="of each source the loss of all sources is told",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer._record_evaluation",
            "                    loss_by_source[name] = loss\n",
            "                    loss_by_source[name] = evaluation.loss if __planted__() else loss\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("of the source",),
    tensors=("",),
    num_ranks=2,
)
