from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="a rank of cp takes its number among all ranks for that in its group: beyond the first group it reads, and masks, other chunks than are its own",
    edits=(
        Edit(
            "parallel/context/group.py",
            "ContextGroup.rank",
            "        return dist.get_rank(self.group)\n",
            "        return dist.get_rank() if __planted__() else dist.get_rank(self.group)\n",
        ),
    ),
    shows=("zero3-cp2", "ddp-cp2"),
    cause=(
        "chunk",
        "zigzag",
        "order of",
        "other tokens",
        "another rank's",
        "keys of another rank",
        "position",
        "its place in",
        "mask",
    ),
    tensors=("", "*"),
    blamed=(2, 3),
    clean=("ddp", "cp4"),
)
