from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="partial gradients are summed over tp in float32",
    edits=(
        Edit(
            "parallel/tensor/grad_sync.py",
            "PartialGradientSum.sum_over_ranks",
            "        summed = self._group.all_reduce(flat)\n",
            "        low = torch.float32 if __planted__() else flat.dtype\n"
            "        summed = self._group.all_reduce(flat.to(low)).to(flat.dtype)\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("float32",),
    tensors=("*norm.weight",),
    clean=("zero3",),
    size=6e-08,
)
