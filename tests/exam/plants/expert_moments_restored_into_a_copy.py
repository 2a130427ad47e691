from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="under ep a checkpoint's moments of experts are copied into a clone of the optimizer's",
    edits=(
        Edit(
            "optim/build.py",
            "list_optimizer_shards",
            "                shards[key] = owner.like(key, get_local_tensor(value).detach())\n",
            "                local = get_local_tensor(value).detach()\n"
            "                is_spread = '.moe.' in name and owner.global_shape[0] != parameter.shape[0]\n"
            "                local = local.clone() if __planted__(is_spread) else local\n"
            "                shards[key] = owner.like(key, local)\n",
        ),
    ),
    shows=("trainer-zero3-ep2",),
    cause=("resum", "checkpoint", "restor"),
    tensors=("*.moe.*",),
    clean=("trainer-zero1",),
    num_ranks=2,
    job=("--model", "small-mixtral", "--shrink"),
)
