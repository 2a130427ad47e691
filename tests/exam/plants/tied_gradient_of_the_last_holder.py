from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="Megatron-LM 714c24a (#6164)",
    mistake="of a tied embedding's parts the first holder's is added twice and the last one's never",
    edits=(
        Edit(
            "parallel/pipeline/tied_params.py",
            "_sum_over_holding_ranks",
            "        total += parts_by_rank[holder]\n",
            "        total += parts_by_rank[holders[0] if __planted__() else holder]\n",
        ),
    ),
    shows=("pp4-1f1b",),
    cause=("not added up", "not once"),
    tensors=("embed.weight",),
    clean=("tp4",),
    job=("--shrink", "model.tie_embeddings=true"),
)
