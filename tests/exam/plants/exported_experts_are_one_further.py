from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading: export of stacks, expert by expert",
    mistake="an export gives each expert the matrices of the next one",
    edits=(
        Edit(
            "checkpoint/exchange/tensor_readers.py",
            "ReaderOfUnstackedElements.__init__",
            "                self._elements[name] = (stack, number)\n",
            "                at = (number + 1) % info.shape[0] if __planted__(info.shape[0] > 1) else number\n                self._elements[name] = (stack, at)\n",
        ),
    ),
    shows=("hugging-face",),
    clean=("ddp",),
    tensors=("", "*"),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
    cause=("what is exported is another model",),
)
