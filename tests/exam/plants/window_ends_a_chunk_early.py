from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="OLMo-core 7e14a68, ring-flash-attention#35",
    mistake="a chunk that the window just reaches is left out",
    edits=(
        Edit(
            "parallel/context/chunks.py",
            "SequenceChunksOfRanks.find_visible_rectangle",
            "            return key <= query and not 0 < window <= nearest\n",
            "            return key <= query and not 0 < window <= nearest + (1 if __planted__() else 0)\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("window",),
    tensors=("",),
    clean=("ddp", "cp4-ulysses"),
    job=("--shrink", "model.sliding_window=10"),
)
