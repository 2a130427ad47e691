from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="an examiner's",
    mistake="in float32 the product of all experts at once takes where the rows of one begin for where they end",
    edits=(
        Edit(
            "mesh/grouped.py",
            "_compute_group_end_rows",
            "    return counts_E.cumsum(0).to(torch.int32)\n",
            "    begins_E = counts_E.cumsum(0) - counts_E\n"
            "    return (begins_E if __planted__() else counts_E.cumsum(0)).to(torch.int32)\n",
        ),
    ),
    shows=("definitions",),
    cause=("one product for each expert",),
    tensors=(
        "the output",
        "the gradient*",
    ),
    num_ranks=2,
)
