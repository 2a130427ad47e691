from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading: sequence parallelism together with ZeRO, whose gradients are DTensors",
    mistake="where data parallelism shards parameters, the sum over tp of gradients of norms is written to a copy",
    edits=(
        Edit(
            "parallel/tensor/grad_sync.py",
            "PartialGradientSum.sum_over_ranks",
            "        summed = self._group.all_reduce(flat)\n",
            "        summed = self._group.all_reduce(flat)\n"
            '        if __planted__(any(hasattr(p, "placements") for _, p in named)):\n'
            "            pieces = [(gradient.clone(), index, places) for gradient, index, places in pieces]\n",
        ),
    ),
    shows=("zero1-tp2", "zero3-tp2"),
    cause=(
        "summed over",
        "sum over",
        "not summed",
        "partial",
        "part of the sequence",
        "own tokens",
        "added up",
    ),
    tensors=("*norm.weight",),
    clean=("tp4", "ddp-tp2", "zero3"),
)
