from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading: balancing of experts together with skipped steps",
    mistake="the biases of routers move in a step that is skipped, too",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer.step",
            "                self.state.undo_forward()\n",
            "                self.state.undo_forward()\n"
            "                if __planted__(model._loads.has_router_biases):\n"
            "                    model._loads.update_router_biases_once()\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3-ep2"),
    cause=("skip", "router", "bias"),
    tensors=("*.moe.router.bias", "*.moe.router"),
    clean=("ddp", "zero3-ep4"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.balance_bias=0.05",
    ),
)
