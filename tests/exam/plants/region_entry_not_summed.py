from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="planted before in phalanx's tests",
    mistake="the backward of a region's entry keeps what a rank's own features owe",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "_CopyInputFunction.backward",
            "        return ctx.group.all_reduce(grad), None\n",
            "        return (grad if __planted__() else ctx.group.all_reduce(grad)), None\n",
        ),
    ),
    shows=("tp4-whole-sequence",),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("norm.weight",),
    clean=("tp4",),
)
