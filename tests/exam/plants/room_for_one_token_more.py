from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="an expert takes one token more than it has room for",
    edits=(
        Edit(
            "nn/routing.py",
            "Router._mark_choices_within_capacity",
            "        return (self.sequences.earlier(chosen_BTE) < room).gather(-1, experts_BTK)\n",
            "        room += 1 if __planted__() else 0\n"
            "        return (self.sequences.earlier(chosen_BTE) < room).gather(-1, experts_BTK)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
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
