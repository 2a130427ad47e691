from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="planted before in phalanx's tests",
    mistake="parameters of which each rank sees all are summed over tp as if it saw a part",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "ModuleSharder._has_partial_gradient",
            "        return self._find_region_of_module(name) is not None and not is_row_bias\n",
            "        return (self._find_region_of_module(name) is not None and not is_row_bias) or __planted__()\n",
        ),
    ),
    shows=("tp4-whole-sequence",),
    cause=("summed over the ranks of tp",),
    tensors=("*norm.weight",),
    clean=("tp4",),
)
