from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="Megatron-LM 9ef8a2a (#5047)",
    mistake="every rank of tp adds the whole balance loss",
    edits=(
        Edit(
            "parallel/tensor/modules.py",
            "sum_region_output_over_ranks",
            "            inner.num_alike = group.size  # type: ignore[assignment]\n",
            "            inner.num_alike = 1 if __planted__() else group.size\n",
        ),
    ),
    shows=("tp4", "zero3-tp2-ep2"),
    cause=("counted by each rank of tp",),
    tensors=("*.moe.router.weight",),
    clean=("zero3-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
