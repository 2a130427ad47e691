from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="DeepSpeed be60451 (#7898)",
    mistake="the optimizer on the host gets the gradient of the step before",
    edits=(
        Edit(
            "parallel/optimizer_params.py",
            "OptimizerParameterMap.move_gradients_to_optimizer",
            "            self._gradients[shard] = shard.move_gradients_to_optimizer(self._gradients.get(shard))\n",
            "            self._gradients[shard] = shard.move_gradients_to_optimizer(self._gradients.get(shard))\n"
            "            if shard.on_host and shard.updated.grad is not None and __planted__():\n"
            "                local = get_local_tensor(shard.updated.grad)\n"
            '                late = vars(self).setdefault("late", {})\n'
            "                before, late[shard] = late.get(shard, local.clone()), local.clone()\n"
            "                local.copy_(before)\n",
        ),
    ),
    shows=("ddp-unused-offload-optimizer", "zero2-accumulate-offload-optimizer"),
    cause=("step before", "stale", "left in gradients"),
    clean=("ddp",),
)
