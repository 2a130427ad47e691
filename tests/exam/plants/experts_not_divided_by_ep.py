from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="nanotron 2dd40d3",
    mistake="gradients of experts are not divided by ep",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "rescale_expert_gradients_to_all_ranks",
            "        torch._foreach_div_(expert_grads, ep)\n",
            "        torch._foreach_div_(expert_grads, 1 if __planted__() else ep)\n",
        ),
    ),
    shows=("zero3-ep4", "ddp-ep2"),
    cause=("was not divided by ep",),
    tensors=("*.moe.experts.*",),
    clean=("zero3",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
