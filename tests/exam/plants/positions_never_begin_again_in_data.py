from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="positions of packed documents go on from one to the next",
    edits=(
        Edit(
            "data/samples.py",
            "SampleWindows.number_positions_and_documents",
            "        positions = at - np",
            "        positions = at if __planted__() else at - np",
        ),
    ),
    shows=("definitions",),
    cause=("by definition",),
    tensors=("positions",),
    num_ranks=2,
)
