from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="an examiner's",
    mistake="a rank's part of the vocabulary begins where it would if all parts were as long as its own",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "VocabularyShard.first_vocabulary_row",
            "        return sum(self.sizes[: self.group.rank])\n",
            "        if __planted__(self.group.rank > 0):\n"
            "            return self.group.rank * self.sizes[self.group.rank]\n"
            "        return sum(self.sizes[: self.group.rank])\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("vocab", "border", "cuts elsewhere", "rows of other ranks", "other rows"),
    tensors=("", "head.weight", "embed.weight"),
    clean=("ddp", "zero3"),
)
