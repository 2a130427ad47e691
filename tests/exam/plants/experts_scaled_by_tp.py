from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="DeepSpeed e5dd550 (#5259)",
    mistake="gradients of experts are divided by tp as well",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "ExpertParallel.apply",
            "            lambda named: rescale_expert_gradients_to_all_ranks(named, frozenset(cuts), layout.ep)\n",
            "            lambda named: rescale_expert_gradients_to_all_ranks(\n"
            "                named, frozenset(cuts), layout.ep * (layout.tp if __planted__(layout.tp > 1) else 1)\n"
            "            )\n",
        ),
    ),
    shows=("zero3-tp2-ep2", "tp2-cp2-ep2"),
    cause=("divided", "tp", "0.5"),
    tensors=("*.moe.experts.*",),
    clean=("zero3-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
