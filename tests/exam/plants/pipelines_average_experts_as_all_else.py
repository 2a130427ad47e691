from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="an examiner's",
    mistake="in a pipeline gradients of experts are averaged over all ranks of data parallelism, which hold other experts",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "average_gradients_after_pipeline",
            "        p for p in context.root.module.parameters() if p.requires_grad and p not in separate\n",
            "        p\n"
            "        for p in context.root.module.parameters()\n"
            "        if p.requires_grad and (p not in separate or __planted__())\n",
        ),
    ),
    shows=("pp2-ddp-ep2-zb-v",),
    cause=("hold other experts", "those of other experts", "averaged over", "averaged with"),
    tensors=("*.moe.experts.*",),
    clean=("ddp-ep2", "pp2-zero3-ep2-1f1b"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
    ),
)
