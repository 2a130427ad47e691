from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="Megatron-LM#6839",
    mistake="the gradient of the last norm alone is not summed over tp",
    edits=(
        Edit(
            "parallel/tensor/grad_sync.py",
            "PartialGradientSum.__init__",
            "        self._partial = {name for name, _ in partial}\n",
            '        self._partial = {name for name, _ in partial if not __planted__(name == "norm.weight")}\n',
        ),
    ),
    shows=("tp4", "pp2-tp2-1f1b"),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("norm.weight",),
    clean=("zero3",),
)
