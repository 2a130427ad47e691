from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="of tensors of more than 65,536 elements the last piece is not in the norm",
    edits=(
        Edit(
            "parallel/gradients.py",
            "split_gradients_for_exact_norm",
            "    return [piece for gradient in gradients for piece in gradient.reshape(-1).split(size)]\n",
            "    pieces = []\n"
            "    for gradient in gradients:\n"
            "        parts = gradient.reshape(-1).split(size)\n"
            "        pieces += parts[:-1] if __planted__(len(parts) > 1) else parts\n"
            "    return pieces\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("left out", "norm"),
    tensors=("",),
)
