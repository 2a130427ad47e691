from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="planted before in phalanx's tests",
    mistake="a row's features are those of the opposite rank",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "ModuleSharder._find_dim_slices_of_rank",
            "        return rule.list_rank_slices(size, self.group.size, self.group.rank, name=name)\n",
            "        rank = self.group.rank\n"
            '        if __planted__(rule.kind == "row"):\n'
            "            rank = self.group.size - 1 - rank\n"
            "        return rule.list_rank_slices(size, self.group.size, rank, name=name)\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("sharding rule cuts elsewhere",),
    tensors=("",),
    clean=("zero3",),
)
