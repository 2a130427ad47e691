from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="where weights are sharded AdamW's eps is a hundred times larger",
    edits=(
        Edit(
            "optim/optimizers/adamw.py",
            "build",
            "        eps=optim.eps,\n",
            '        eps=optim.eps * (100 if __planted__(any(hasattr(p, "to_local") for p in groups.parameters())) else 1),\n',
        ),
    ),
    shows=("zero3",),
    cause=("eps were 1e-06 in place of 1e-08",),
    clean=("ddp",),
)
