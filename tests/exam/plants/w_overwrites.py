from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="Megatron-LM f9e6b94 (!3645)",
    mistake="a W overwrites what earlier microbatches have left",
    edits=(
        Edit(
            "parallel/pipeline/weight_grads.py",
            "_add_to_parameter_gradient",
            "        parameter.grad += gradient\n",
            "        parameter.grad = gradient if __planted__() else parameter.grad + gradient\n",
        ),
    ),
    shows=("pp2-tp2-zb-v", "pp2-tp2-interleaved-zero-bubble"),
    cause=("a w is left out",),
    tensors=(
        "*.q.weight",
        "*.k.weight",
        "*.v.weight",
        "*.o.weight",
        "*.up.weight",
        "*.gate.weight",
        "*.down.weight",
    ),
    clean=("pp4-1f1b",),
)
