from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="the first token of a rank's part of the vocabulary counts on no rank",
    edits=(
        Edit(
            "nn/objective.py",
            "_sum_loss_and_write_gradient",
            "        is_here = valid & (picked >= 0) & (picked < logits_NV.shape[1])\n",
            "        lowest = 1 if __planted__(vocabulary.first_vocabulary_row > 0) else 0\n"
            "        is_here = valid & (picked >= lowest) & (picked < logits_NV.shape[1])\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("vocab", "cut", "border"),
    tensors=("", "head.weight", "embed.weight"),
    clean=("ddp",),
)
