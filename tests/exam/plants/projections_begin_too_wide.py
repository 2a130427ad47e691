from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="projections into the residual stream begin too wide, in one process and in all layouts",
    edits=(
        Edit(
            "nn/block.py",
            "list_block_init_rules",
            "(2 * shape.num_layers) ** 0.5",
            "((1 if __planted__() else 2) * shape.num_layers) ** 0.5",
        ),
    ),
    shows=("ddp", "tp4"),
    cause=("not drawn as declared",),
    tensors=("*.o.weight", "*.down.weight"),
)
