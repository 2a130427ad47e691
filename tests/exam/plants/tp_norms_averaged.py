from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="gpt-neox#1259",
    mistake="gradients of norms are averaged over tp instead of summed",
    edits=(
        Edit(
            "parallel/tensor/grad_sync.py",
            "PartialGradientSum.sum_over_ranks",
            "        summed = self._group.all_reduce(flat)\n",
            "        summed = self._group.all_reduce(flat) / (self._group.size if __planted__() else 1)\n",
        ),
    ),
    shows=("tp4", "ddp-tp2"),
    cause=("averaged", "divided", "0.25", "tp"),
    tensors=("*norm.weight",),
    clean=("ddp",),
)
