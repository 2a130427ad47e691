from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="an examiner's",
    mistake="a job that says no betas gets torch's, not the documented ones",
    edits=(
        Edit(
            "job/schema/optim.py",
            "Optim",
            "    betas: tuple[Fraction, Fraction] = (0.9, 0.95)\n",
            "    betas: tuple[Fraction, Fraction] = (0.9, 0.999 if __planted__() else 0.95)\n",
        ),
    ),
    shows=("definitions",),
    cause=("docs say",),
    tensors=("optim.betas",),
    num_ranks=2,
)
