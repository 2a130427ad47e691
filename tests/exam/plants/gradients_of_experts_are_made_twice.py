from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="an examiner's",
    mistake="where a backward is split, experts have their weight's gradient at once and in their W once more",
    edits=(
        Edit(
            "parallel/pipeline/weight_grads.py",
            "_GroupedLinearDeferredGradientFunction.backward",
            "            return grad_x, None, None\n",
            "            if __planted__():\n"
            "                made = compute_expert_weight_gradients(grad, x, counts)\n"
            "                return grad_x, made.to(weight.dtype), None\n"
            "            return grad_x, None, None\n",
        ),
    ),
    shows=("pp2-zero3-ep2-zb-v", "pp2-ddp-ep2-zb-v"),
    cause=("2 x", "2.0 x", "twice", "double"),
    tensors=("*.moe.experts.*",),
    clean=("pp2-zero3-ep2-1f1b",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
