from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="gradients of keys and values that ranks share are added up over ranks with other heads",
    edits=(
        Edit(
            "parallel/tensor/grad_sync.py",
            "PartialGradientSum._list_gradient_parts",
            "rank // box.num_replicas, size",
            "(rank % (size // box.num_replicas) if __planted__() else rank // box.num_replicas), size",
        ),
    ),
    shows=("tp4",),
    cause=("share", "hold alike", "other ranks"),
    tensors=("*.k.weight", "*.v.weight"),
    job=("--shrink", "model.num_heads=4", "model.num_kv_heads=2"),
)
