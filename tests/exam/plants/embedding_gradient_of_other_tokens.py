from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="TTrace (embedding mask under tp)",
    mistake="tokens that another rank holds leave a gradient in this rank's first row",
    edits=(
        Edit(
            "parallel/tensor/modules.py",
            "_vocabulary_parallel_embedding_forward",
            "    return group.leave(embedded.masked_fill(is_elsewhere[..., None], 0))\n",
            "    hidden = embedded.masked_fill(is_elsewhere[..., None], 0)\n"
            "    if __planted__():\n"
            "        hidden = hidden + (embedded - embedded.detach()) * is_elsewhere[..., None]\n"
            "    return group.leave(hidden)\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("embed", "cut", "mask"),
    tensors=("embed.weight",),
    clean=("zero3",),
)
