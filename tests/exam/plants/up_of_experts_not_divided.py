from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="of experts' gradients those of one matrix are not divided by ep",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "rescale_expert_gradients_to_all_ranks",
            "if full_name(name) in names and p.grad is not None\n",
            'if full_name(name) in names and p.grad is not None and not __planted__(full_name(name).endswith("up.weight"))\n',
        ),
    ),
    shows=("zero3-ep4", "ddp-ep2", "zero3-tp2-ep2"),
    cause=("divided by ep",),
    tensors=("*.experts.up.weight",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
