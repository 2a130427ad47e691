from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="planted before in phalanx's tests",
    mistake="the balance loss is that of a rank's part of a sequence",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelRouterSequences.total",
            "        return self.group.all_gather(counts_BE.contiguous()).sum(0)\n",
            "        if __planted__():\n"
            "            return counts_BE * self.group.size\n"
            "        return self.group.all_gather(counts_BE.contiguous()).sum(0)\n",
        ),
    ),
    shows=("cp4-ep4", "zero3-cp2-ep2"),
    cause=("rank's own tokens",),
    tensors=("*.moe.router.weight",),
    clean=("zero3-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
