from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="the permutation of an epoch's samples has another key for each sample: some windows are read again and others never",
    edits=(
        Edit(
            "data/order.py",
            "SampleOrder.sample_starts",
            "        keys = self._hash_epoch_keys(epochs)\n",
            "        keys = self._hash_epoch_keys(samples if __planted__() else epochs)\n",
        ),
    ),
    shows=("definitions",),
    cause=("by definition", "definition", "epoch", "each once", "permut", "twice"),
    num_ranks=2,
)
