from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="rows that arrive are sorted by the experts of the rank that sent them",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "ExpertDispatchBetweenRanks.__call__",
            "        numbers = torch.arange(arrived_PE.shape[1], device=x_RD.device).repeat(size)\n",
            "        numbers = torch.arange(arrived_PE.shape[1], device=x_RD.device).repeat(size)\n"
            "        if __planted__(arrived_PE.shape[1] > 1):\n"
            "            numbers = numbers.flip(0)\n",
        ),
    ),
    shows=("zero3-ep2", "ddp-ep2"),
    cause=("rows", "experts"),
    tensors=("", "*.moe.router"),
    clean=("zero3-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
