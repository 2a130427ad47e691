from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="Megatron-LM cd4afff (#5916), b2e9390 (#3024)",
    mistake="gradients of experts that are spread are not in the norm",
    edits=(
        Edit(
            "parallel/gradients.py",
            "collect_gradients_and_sum_squares",
            "        for block in blocks[full_name(name)]:\n",
            "        for block in () if __planted__(parameter.ndim == 3) else blocks[full_name(name)]:\n",
        ),
    ),
    shows=("zero3-ep4", "zero3-ep2"),
    cause=("left out", "experts"),
    tensors=("",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
