from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="Megatron-LM 4f8974a (!2564), DeepSpeed 9d2660d (#4957)",
    mistake="gradients of experts are divided by ep twice",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "rescale_expert_gradients_to_all_ranks",
            "        torch._foreach_div_(expert_grads, ep)\n",
            "        torch._foreach_div_(expert_grads, ep * ep if __planted__() else ep)\n",
        ),
    ),
    shows=("zero3-ep4", "zero3-ep2"),
    cause=("divided by ep",),
    tensors=("*.moe.experts.*",),
    clean=("zero3",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
