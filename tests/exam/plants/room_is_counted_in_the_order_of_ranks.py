from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading: capacity of experts together with zigzag",
    mistake="under zigzag of cp the room of an expert goes to tokens in the order of ranks, not of the sequence",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelRouterSequences.earlier",
            "                counts_of_chunk[chunk] = counts[r, :, at]\n",
            "                per_rank = chunks.chunks_per_rank\n"
            "                number = r * per_rank + at if __planted__(per_rank > 1) else chunk\n"
            "                counts_of_chunk[number] = counts[r, :, at]\n",
        ),
    ),
    shows=("cp4", "zero3-cp2"),
    cause=("capacity", "room", "dropped", "drops", "order of the sequence", "earlier tokens"),
    tensors=("", "*.moe*"),
    clean=("ddp", "zero3-ep4", "cp4-one-run"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.expert_capacity=0.7",
    ),
)
