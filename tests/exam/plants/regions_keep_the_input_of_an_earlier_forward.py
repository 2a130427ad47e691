from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="an examiner's",
    mistake="what a region keeps of its input for the backward is that of the first forward of all",
    edits=(
        Edit(
            "mesh/gathered_input.py",
            "RegionInput.forget",
            "        self._casts = {}\n",
            "        if not __planted__(bool(self._casts)):\n            self._casts = {}\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("another microbatch", "microbatch", "input"),
    tensors=("blocks.1.ffn.up.weight", "blocks.1.ffn.gate.weight"),
    clean=("tp4-whole-sequence", "zero3"),
)
