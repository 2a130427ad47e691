from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="an examiner's",
    mistake="choices that were kept are counted as dropped for want of room",
    edits=(
        Edit(
            "nn/routing.py",
            "Router._add_balance_loss_gradient",
            "            dropped = (~kept_BTK).sum()\n",
            "            dropped = (kept_BTK if __planted__() else ~kept_BTK).sum()\n",
        ),
    ),
    shows=("ddp",),
    cause=("said to be dropped",),
    tensors=("*router",),
    num_ranks=2,
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.expert_capacity=0.7",
    ),
)
