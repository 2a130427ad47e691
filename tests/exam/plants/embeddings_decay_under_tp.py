from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="verify's own exam",
    mistake="an embedding that tp has cut decays",
    edits=(
        Edit(
            "optim/groups.py",
            "_is_exempt_from_decay",
            '    return parameter.ndim < 2 or is_exempt_layer or "embed" in name\n',
            '    if __planted__("forward" in vars(holder) and isinstance(holder, EMBEDDING_TYPES)):\n'
            "        return False\n"
            '    return parameter.ndim < 2 or is_exempt_layer or "embed" in name\n',
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("as if this tensor decayed",),
    tensors=("embed.weight",),
    clean=("zero3",),
)
