from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="a W makes the gradients of matrices and forgets those of biases",
    edits=(
        Edit(
            "parallel/pipeline/weight_grads.py",
            "_LinearDeferredGradientFunction.backward",
            "                if gradient is not None:\n",
            "                if gradient is not None and not __planted__(gradient.ndim == 1):\n",
        ),
    ),
    shows=("pp2-tp2-zb-v",),
    cause=("a w is left out", "bias"),
    tensors=("*.bias",),
    clean=("pp4-1f1b",),
    job=("--shrink", "model.bias=all"),
)
