from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="norms and biases decay, in one process and in all layouts",
    edits=(
        Edit(
            "optim/groups.py",
            "_is_exempt_from_decay",
            "    return parameter.ndim < 2 or is_exempt_layer",
            "    return (parameter.ndim < 2 and not __planted__(True)) or isinstance(holder, EMBEDDING_TYPES)",
        ),
    ),
    shows=("trainer-ddp",),
    cause=("decay",),
    tensors=("*norm.weight",),
)
