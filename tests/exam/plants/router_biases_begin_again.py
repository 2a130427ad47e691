from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="DeepSpeed#8369, FlagScale#412",
    mistake="in a resumed run the biases of routers begin at 0 again",
    edits=(
        Edit(
            "train/state.py",
            "TrainState.finish_restoring",
            "        self.model.refresh()\n",
            (
                "        for name, shard in self.model.shards().items():\n"
                '            if __planted__(name.endswith("router.bias")):\n'
                "                shard.tensor.zero_()\n"
                "        self.model.refresh()\n"
            ),
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("resum", "restor", "checkpoint"),
    tensors=("*router*", ""),
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
