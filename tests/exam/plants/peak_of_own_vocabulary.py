from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="each rank subtracts the largest of its own logits",
    edits=(
        Edit(
            "nn/objective.py",
            "_sum_loss_and_write_gradient",
            "        picked, peak = picked.where(is_here, 0), vocabulary.max_over_ranks(peak)\n",
            "        picked, peak = picked.where(is_here, 0), (peak if __planted__() else vocabulary.max_over_ranks(peak))\n",
        ),
    ),
    shows=("tp4", "tp2-cp2"),
    cause=("sum over the ranks of tp", "vocab", "head"),
    tensors=("", "head.weight", "embed.weight"),
    clean=("ddp",),
)
