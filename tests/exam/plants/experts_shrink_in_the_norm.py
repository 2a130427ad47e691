from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading: Megatron-LM's norm over expert-parallel ranks",
    mistake="the squares of experts' gradients are divided by ep in the norm",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer._collect_gradients_and_squares",
            "                name: list_local_blocks_with_replica_counts(shard) for name, shard in shards.items()\n"
            "            }\n",
            "                name: list_local_blocks_with_replica_counts(shard) for name, shard in shards.items()\n"
            "            }\n"
            "            ep = self._context.plan.layout.ep\n"
            "            for name, blocks in self._held.items():\n"
            '                if __planted__(ep > 1 and ".experts." in name):\n'
            "                    more = [replace(block, num_holders=block.num_holders * ep) for block in blocks]\n"
            "                    self._held[name] = tuple(more)\n",
        ),
    ),
    shows=("zero3-ep4", "ddp-ep2"),
    cause=("expert", "counted", "counts", "share of the norm", "replica"),
    tensors=("",),
    clean=("ddp", "zero3"),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
