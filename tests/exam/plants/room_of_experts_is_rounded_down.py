from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="an examiner's",
    mistake="a share of tokens that is no whole number gives an expert room for one token less",
    edits=(
        Edit(
            "nn/routing.py",
            "compute_expert_capacity",
            "    return max(1, math.ceil(round(factor * num_tokens * per_token / num_experts, 6)))",
            "    room = round(factor * num_tokens * per_token / num_experts, 6)\n"
            "    return max(1, int(room) if __planted__(room % 1) else math.ceil(room))",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn", "capacity", "for want of room"),
    tensors=("", "*"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.expert_capacity=0.7",
    ),
)
