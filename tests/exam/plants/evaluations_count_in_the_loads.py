from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="prime-rl#2953",
    mistake="what experts get in an evaluation counts in the loads of the next step",
    edits=(
        Edit(
            "nn/routing.py",
            "Router.forward",
            "            weights_BTK = scores_BTE.gather(-1, experts_BTK)\n",
            (
                "            if __planted__(not torch.is_grad_enabled()):\n"
                "                self.load.add(chosen_BTE.sum((0, 1)), chosen_BTE.new_zeros(()))\n"
                "            weights_BTK = scores_BTE.gather(-1, experts_BTK)\n"
            ),
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("evaluation",),
    tensors=("", "*router*"),
    num_ranks=2,
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.balance_bias=0.05",
    ),
)
