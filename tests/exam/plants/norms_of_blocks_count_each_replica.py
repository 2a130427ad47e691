from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="norms by block count what several ranks hold once for each of them",
    edits=(
        Edit(
            "parallel/block_norms.py",
            "BlockSquares._compute_share",
            "        return 1.0 / holders\n",
            "        return 1.0 if __planted__(holders > 1) else 1.0 / holders\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-tp2"),
    cause=("on record the norm",),
    tensors=("",),
    num_ranks=2,
)
