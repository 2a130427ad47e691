from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="AdamW's eps is not the job's, in one process and in all layouts",
    edits=(
        Edit(
            "optim/optimizers/adamw.py",
            "build",
            "        eps=optim.eps,\n",
            "        eps=optim.eps * (1e4 if __planted__() else 1),\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("eps",),
)
