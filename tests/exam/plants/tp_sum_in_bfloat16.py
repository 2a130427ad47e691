from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="pytorch#172684",
    mistake="partial gradients are summed over tp in bfloat16",
    edits=(
        Edit(
            "parallel/tensor/grad_sync.py",
            "PartialGradientSum.sum_over_ranks",
            "        summed = self._group.all_reduce(flat)\n",
            "        low = torch.bfloat16 if __planted__() else flat.dtype\n"
            "        summed = self._group.all_reduce(flat.to(low)).to(flat.dtype)\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("bfloat16",),
    tensors=("*norm.weight",),
    clean=("zero3",),
)
