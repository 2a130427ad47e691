from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="planted before in phalanx's tests",
    mistake="keys and values of more ranks than heads keep their own part of the gradient",
    edits=(
        Edit(
            "parallel/tensor/grad_sync.py",
            "PartialGradientSum.__init__",
            "name for name, cut in cuts.items() if any(box.num_replicas > 1 for box in cut.boxes)\n",
            "name\n"
            "            for name, cut in cuts.items()\n"
            "            if any(box.num_replicas > 1 for box in cut.boxes) and not __planted__()\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("*.k.weight", "*.v.weight", "*.k.bias", "*.v.bias"),
    job=("--shrink", "model.bias=all", "model.num_heads=4", "model.num_kv_heads=1"),
)
