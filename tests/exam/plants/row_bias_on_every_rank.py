from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="torchtitan 2b935fa (#4245)",
    mistake="the bias behind a row is added once by each rank of tp",
    edits=(
        Edit(
            "parallel/tensor/modules.py",
            "_row_parallel_forward",
            "    return out + part.bias.to(out.dtype)\n",
            "    return out + part.bias.to(out.dtype) * (group.size if __planted__() else 1)\n",
        ),
    ),
    shows=("tp4", "tp4-whole-sequence"),
    cause=("bias", "summed over the ranks of tp"),
    tensors=("", "*.o.bias", "*.down.bias"),
    clean=("ddp",),
    job=("--shrink", "model.bias=all"),
)
