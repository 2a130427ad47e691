from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: ZeRO-1's gather beside ZeRO-3's",
    mistake="of a parameter that ZeRO-1 has updated ranks read the first rows of each other's, in place of those that it updated",
    edits=(
        Edit(
            "parallel/data_parallel/zero1.py",
            "UpdatedParameterGather._show_parameter",
            "        return GatheredTensor(flat, [flat[start : start + chunk] for start in starts], starts)\n",
            "        rows = [flat[start : start + chunk] for start in starts]\n        return GatheredTensor(flat, rows, [0] * len(starts) if __planted__() else starts)\n",
        ),
    ),
    shows=("zero1", "hsdp2x2-zero1"),
    clean=("ddp", "zero3"),
    tensors=("*",),
    cause=("rows of other ranks", "what is gathered"),
)
