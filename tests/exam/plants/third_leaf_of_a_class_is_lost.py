from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake='with train.deterministic = "layout-free" a third microbatch of a class is not added to its sum',
    edits=(
        Edit(
            "parallel/data_parallel/gradient_tree.py",
            "PartialSums.add",
            "        if self._num_in_class:\n",
            (
                "        if __planted__(self._num_in_class == 2):\n"
                "            pass\n"
                "        elif self._num_in_class:\n"
            ),
        ),
    ),
    shows=("ddp",),
    cause=("microbatch",),
    job=("--shrink", "train.deterministic=layout-free", "train.micro_batch_size=2"),
)
