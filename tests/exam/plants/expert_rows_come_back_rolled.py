from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="planted before in phalanx's tests",
    mistake="rows of experts come back to other tokens",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "ExpertDispatchBetweenRanks.__call__",
            "        outputs = experts(rows.index_select(0, order), counts_here)\n",
            "        outputs = experts(rows.index_select(0, order), counts_here)\n"
            "        outputs = outputs.roll(1, 0) if __planted__() else outputs\n",
        ),
    ),
    shows=("zero3-ep4", "ddp-ep2"),
    cause=("come back to other tokens",),
    tensors=("", "*.moe.router"),
    clean=("zero3",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
