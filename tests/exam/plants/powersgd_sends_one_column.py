from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading",
    mistake="powersgd sends one column, whatever compress_rank says",
    edits=(
        Edit(
            "parallel/hooks/powersgd.py",
            "PowerSgd.__init__",
            "        self._rank, self._seed = rank, seed\n",
            "        self._rank, self._seed = (1 if __planted__() else rank), seed\n",
        ),
    ),
    shows=("ddp-powersgd",),
    cause=("columns of it",),
    clean=("ddp-int8",),
)
