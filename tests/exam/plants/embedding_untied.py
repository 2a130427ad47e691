from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="accelerate 8159c98 (#3154)",
    mistake="a tied head becomes a copy that no longer follows the embedding",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "DpReplicate.apply",
            "        context.materialize()\n",
            "        context.materialize()\n"
            "        module = context.root.module\n"
            "        if __planted__(module.head is None):\n"
            "            module.head = torch.nn.Linear(1, 1, bias=False)\n"
            "            module.head.weight = torch.nn.Parameter(module.embed.weight.detach().clone())\n",
        ),
    ),
    shows=("ddp", "zero1"),
    cause=("tied",),
    tensors=("head.weight",),
    clean=("zero3",),
    job=("--shrink", "model.tie_embeddings=true"),
)
