from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="Megatron-LM#1446",
    mistake="gradients of norms are not summed over tp under sequence parallelism",
    edits=(
        Edit(
            "parallel/tensor/grad_sync.py",
            "PartialGradientSum.__init__",
            "        self._partial = {name for name, _ in partial}\n",
            "        self._partial = set() if __planted__() else {name for name, _ in partial}\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("*norm.weight",),
    clean=("zero3",),
)
