from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="in a pipeline the two decay rates of AdamW's moments are swapped",
    edits=(
        Edit(
            "optim/optimizers/adamw.py",
            "build",
            "        betas=optim.betas,\n",
            "        betas=optim.betas[::-1] if __planted__(groups.keeps_empty) else optim.betas,\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("betas were swapped",),
    clean=("zero3",),
)
