from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="where no token marks the end of a document its last token learns the first of the next",
    edits=(
        Edit(
            "data/samples.py",
            "SampleWindows.cut_samples",
            "        if not self.ends_are_marked:\n",
            "        if not (self.ends_are_marked or __planted__()):\n",
        ),
    ),
    shows=("definitions",),
    cause=("definition",),
    tensors=("targets",),
    num_ranks=2,
    job=("--shrink", "data.document_masks=true"),
)
