from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="FSDP casts the float32 tables that blocks rotate by to bf16",
    edits=(
        Edit(
            "nn/models/decoder.py",
            "Decoder",
            "    block_inputs_are_cast = True\n",
            "    block_inputs_are_cast = not __planted__()\n",
        ),
    ),
    shows=("zero3",),
    cause=("cosines and sines",),
    tensors=("blocks.0.attention",),
    clean=("ddp",),
    num_ranks=2,
    job=("--shrink", "precision.compute=bf16"),
)
