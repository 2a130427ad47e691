from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading: a rank counted from the other end",
    mistake="a rank of ep keeps the experts of the rank as far from the other end, and gets the tokens of its own",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "_keep_experts_of_rank",
            "        start = group.rank * size\n",
            "        start = (group.size - 1 - group.rank if __planted__() else group.rank) * size\n",
        ),
    ),
    shows=("zero3-ep2", "zero3-ep4", "ddp-ep2"),
    clean=("zero3",),
    tensors=("", "*"),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
    cause=("hold experts of other ranks",),
)
