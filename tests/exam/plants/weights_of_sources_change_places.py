from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="an evaluation gives the first source of a mixture the last one's weight",
    edits=(
        Edit(
            "data/corpus.py",
            "Corpus.weight_of_name",
            "self.weights,",
            "self.weights[::-1] if __planted__() else self.weights,",
        ),
    ),
    shows=("definitions",),
    cause=("in the mixture",),
    tensors=("a",),
    num_ranks=2,
)
