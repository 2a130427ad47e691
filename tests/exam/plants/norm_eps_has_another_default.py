from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="a model whose preset says no norm_eps has a hundred times the documented one",
    edits=(
        Edit(
            "job/shapes/transformer.py",
            "TransformerShape",
            "    norm_eps: float = 1e-5\n",
            "    norm_eps: float = 1e-3 if __planted__() else 1e-5\n",
        ),
    ),
    shows=("definitions",),
    cause=("in the shape",),
    tensors=("model.norm_eps",),
    num_ranks=2,
)
