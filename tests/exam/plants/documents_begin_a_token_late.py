from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="the first token of a document counts as the last one of the document before it",
    edits=(
        Edit(
            "data/tokens.py",
            "TokenSequence.document_ids",
            'np.searchsorted(self.document_ends(), at, "right")',
            'np.searchsorted(self.document_ends(), at, "left" if __planted__() else "right")',
        ),
    ),
    shows=("definitions",),
    cause=("by definition", "definition", "document"),
    tensors=("document_ids", "positions", "targets", "*document*"),
    num_ranks=2,
    job=("--shrink", "data.document_masks=true"),
)
