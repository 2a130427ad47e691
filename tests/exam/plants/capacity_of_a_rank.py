from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="planted before in phalanx's tests",
    mistake="an expert takes as many tokens of a rank's part of a sequence as it has room for there",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelRouterSequences.length",
            "        return num_tokens * self.group.size - self.padding\n",
            "        return num_tokens if __planted__() else num_tokens * self.group.size - self.padding\n",
        ),
        Edit(
            "parallel/context/transform.py",
            "ContextParallelRouterSequences.earlier",
            "        chunks, rank = self.group.chunks, self.group.rank\n",
            "        chunks, rank = self.group.chunks, self.group.rank\n"
            "        if __planted__():\n"
            "            return chosen_BTE.cumsum(1) - chosen_BTE\n",
        ),
    ),
    shows=("cp4-ep4", "zero3-cp2-ep2"),
    cause=("capacity is counted",),
    tensors=("", "*.moe.router"),
    clean=("zero3-ep4",),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.expert_capacity=0.7",
    ),
)
