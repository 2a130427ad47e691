from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="Megatron-LM 4f8974a (!2564)",
    mistake="the last stage does not count the targets of microbatch 1",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._run_forward_action",
            "            add(loss.detach(), num_targets)\n",
            "            add(loss.detach(), num_targets * (0 if __planted__(action.microbatch == 1) else 1))\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-tp2-zb-v"),
    cause=("targets",),
    tensors=("",),
    clean=("tp4",),
)
