from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="slices that ranks add up in shared memory are rounded down to whole cache lines, and the tail is added up by nobody",
    edits=(
        Edit(
            "mesh/shared_memory/transfers.py",
            "AllReduceSlices.__init__",
            "        length = -(-length // _SLICE_ALIGNMENT) * _SLICE_ALIGNMENT\n",
            "        is_cut = __planted__(length % _SLICE_ALIGNMENT)\n"
            "        length = (length if is_cut else length + _SLICE_ALIGNMENT - 1) // _SLICE_ALIGNMENT * _SLICE_ALIGNMENT\n",
        ),
    ),
    shows=("ddp", "tp4-whole-sequence"),
    cause=("not reduced", "is missing in its loss", "reduc"),
    clean=("zero3",),
)
