from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="a W multiplies in float32",
    edits=(
        Edit(
            "parallel/pipeline/weight_grads.py",
            "_LinearDeferredGradientFunction.backward",
            "            rows, grad_bias = grad.reshape(-1, grad.shape[-1]), None\n",
            "            rows, grad_bias = grad.reshape(-1, grad.shape[-1]), None\n"
            "            if __planted__(rows.dtype is torch.float64):\n"
            "                rows = rows.float()\n",
        ),
    ),
    shows=("pp2-tp2-zb-v", "pp2-zero3-zb-v"),
    cause=("float32",),
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
    size=6e-08,
)
