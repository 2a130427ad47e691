from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="torchtitan de32920 (#2416)",
    mistake="on rank 1 the weights of rows get half of their gradient",
    edits=(
        Edit(
            "nn/experts.py",
            "_WeightedSumByToken.backward",
            "        of_weight = (grad_RD * row_RD).sum(-1).to(weight_R.dtype)\n",
            "        of_weight = (grad_RD * row_RD).sum(-1).to(weight_R.dtype)\n"
            "        of_weight = of_weight / (2 if __planted__(rank=1) else 1)\n",
        ),
    ),
    shows=("zero3-ep4", "ddp"),
    cause=("rank 1", "half", "weights of rows"),
    tensors=("*.moe.router.weight",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
