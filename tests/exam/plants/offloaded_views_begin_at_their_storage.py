from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="own reading: saved views of one storage",
    mistake="a saved tensor that is a view comes back from host memory as the first elements of its storage",
    edits=(
        Edit(
            "parallel/offload/activations.py",
            "SavedTensorOffloader.restore_saved_tensor",
            "        return view.set_(back.untyped_storage(), packed.offset, packed.size, packed.stride)\n",
            "        offset = 0 if __planted__(packed.offset > 0) else packed.offset\n        return view.set_(back.untyped_storage(), offset, packed.size, packed.stride)\n",
        ),
    ),
    shows=("ddp-offload-activations",),
    clean=("ddp",),
    tensors=("*.attention.q.weight", "*.attention.k.weight"),
    cause=("host memory",),
)
