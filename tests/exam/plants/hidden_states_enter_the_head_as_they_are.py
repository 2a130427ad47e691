from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="an examiner's",
    mistake="where sequences are whole hidden states do not enter the head: their gradient is that of a rank's part of the vocabulary",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "VocabularyShard.enter",
            "        return self.group.enter(hidden)\n",
            "        if __planted__(not self.group.cuts_sequence):\n"
            "            return hidden\n"
            "        return self.group.enter(hidden)\n",
        ),
    ),
    shows=("tp4-whole-sequence",),
    cause=(
        "added up",
        "added them up",
        "not summed",
        "nobody sum",
        "lacks a sum",
        "missing sum",
    ),
    tensors=("norm.weight",),
    clean=("ddp", "tp4"),
)
