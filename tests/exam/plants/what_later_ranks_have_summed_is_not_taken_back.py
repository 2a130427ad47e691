from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="of a tensor that ranks add up in slices a rank takes back the slices before its own, and not those behind it",
    edits=(
        Edit(
            "mesh/shared_memory/transfers.py",
            "AllReduceSlices.collect",
            "        np.copyto(self._values[self._stop :], block[self._stop :])\n",
            "        if not __planted__(self._stop < len(self._values)):\n"
            "            np.copyto(self._values[self._stop :], block[self._stop :])\n",
        ),
    ),
    shows=("tp4-whole-sequence",),
    cause=(
        "not reduced",
        "reduc",
        "stale",
        "is missing in its loss",
        "added up",
        "summed over",
    ),
    blamed=(0, 1, 2),
    clean=("zero3",),
)
