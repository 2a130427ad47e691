from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="an examiner's",
    mistake="FSDP adds up in bf16 what deferred weight gradients of several microbatches are",
    edits=(
        Edit(
            "mesh/compat.py",
            "add_written_gradients_to_fsdp",
            "                parameter.to_accumulated_grad_if_needed()\n",
            "                if not __planted__():\n"
            "                    parameter.to_accumulated_grad_if_needed()\n",
        ),
    ),
    shows=("pp2-zero3-zb-v", "pp2-zero3-interleaved-zero-bubble"),
    cause=("over microbatches",),
    tensors=("",),
    job=("--shrink", "precision.compute=bf16"),
)
