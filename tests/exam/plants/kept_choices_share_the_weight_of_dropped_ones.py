from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="DeepSpeed top2gating",
    mistake="weights of a token's experts are normalised over those that had room",
    edits=(
        Edit(
            "nn/routing.py",
            "Router.forward",
            "                weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)\n",
            (
                "                total = weights_BTK.sum(-1, keepdim=True)\n"
                "                if __planted__(kept_BTK is not None and not bool(kept_BTK.all())):\n"
                "                    kept = (weights_BTK * kept_BTK).sum(-1, keepdim=True)\n"
                "                    total = kept.where(kept > 0, total)\n"
                "                weights_BTK = weights_BTK / total\n"
            ),
        ),
    ),
    shows=("plain",),
    cause=("implementation", "phalanx.nn"),
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
