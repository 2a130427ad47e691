from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="TTrace (cp attention gradients)",
    mistake="gradients of gathered keys are averaged over cp instead of summed",
    edits=(
        Edit(
            "parallel/context/group.py",
            "ContextGroup.reduce_scatter",
            "                return reduce_scatter_rows(rows, self.group)\n",
            "                return reduce_scatter_rows(rows, self.group) / (self.size if __planted__() else 1)\n",
        ),
    ),
    shows=("cp4-all-gather", "zero3-cp2-all-gather"),
    cause=("does not come back", "averaged", "divided"),
    tensors=("blocks.1.attention.k.weight", "blocks.1.attention.v.weight"),
    clean=("cp4",),
)
