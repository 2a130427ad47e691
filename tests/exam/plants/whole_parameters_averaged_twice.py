from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="the mean of parameters that FSDP leaves whole is divided by the ranks twice",
    edits=(
        Edit(
            "parallel/data_parallel/unsharded_params.py",
            "average_gradients_in_one_collective",
            "        flat /= dist.get_world_size(group)\n",
            "        flat /= dist.get_world_size(group) ** (2 if __planted__() else 1)\n",
        ),
    ),
    shows=("zero3-units2-whole", "pp2-ddp-1f1b"),
    cause=("divided",),
    clean=("zero3", "ddp"),
)
