from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="Megatron-Bridge 9aae95f (#5255)",
    mistake="first moments of matrices are saved from, and restored into, a copy",
    edits=(
        Edit(
            "optim/build.py",
            "list_optimizer_shards",
            "                shards[key] = owner.like(key, get_local_tensor(value).detach())\n",
            "                held = get_local_tensor(value).detach()\n"
            '                if __planted__(slot == "exp_avg" and held.ndim > 1 and len(held) > 1):\n'
            "                    held = held.roll(1, 0)\n"
            "                shards[key] = owner.like(key, held)\n",
        ),
    ),
    shows=("trainer-zero3",),
    cause=("resum", "checkpoint", "restor"),
)
