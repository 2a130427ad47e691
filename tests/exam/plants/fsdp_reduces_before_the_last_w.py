from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="phalanx (zero-bubble and reshard_after_forward)",
    mistake="in a pipeline FSDP reduces what the first half of the backward has left",
    edits=(
        Edit(
            "parallel/data_parallel/shard.py",
            "keep_for_pipeline",
            "        root.set_requires_gradient_sync(False)\n"
            "        root.set_is_last_backward(False)\n"
            "        root.set_reshard_after_backward(False)\n",
            "        root.set_requires_gradient_sync(__planted__())\n"
            "        root.set_is_last_backward(False)\n"
            "        root.set_reshard_after_backward(False)\n",
        ),
    ),
    shows=("pp2-zero3-zb-v",),
    cause=("a w is left out", "reduced"),
    clean=("pp2-ddp-zb-v",),
)
