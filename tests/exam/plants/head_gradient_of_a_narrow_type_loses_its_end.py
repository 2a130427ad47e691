from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="in bf16 the last rows of the head have no gradient from a chunk",
    edits=(
        Edit(
            "nn/objective.py",
            "_add_chunk_to_head_gradient",
            "        grad_VD += product_VD\n",
            "        grad_VD += product_VD * (0.0 if __planted__(grad_CV.shape[1] < num_rows) else 1.0)\n",
        ),
    ),
    shows=("ddp", "zero3", "tp4"),
    cause=("backward goes wrong", "vocabulary"),
    tensors=("embed.weight", "head.weight"),
    job=("--shrink", "precision.compute=bf16"),
)
