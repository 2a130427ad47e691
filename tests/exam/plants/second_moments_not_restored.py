from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="transformers-33844 (TrainCheck)",
    mistake="second moments are saved of matrices alone",
    edits=(
        Edit(
            "optim/build.py",
            "list_optimizer_shards",
            "            if not isinstance(value, torch.Tensor):\n                continue\n",
            "            if not isinstance(value, torch.Tensor):\n"
            "                continue\n"
            '            if __planted__(slot == "exp_avg_sq" and parameter.ndim < 2):\n'
            "                continue\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("resum", "checkpoint", "restor"),
)
