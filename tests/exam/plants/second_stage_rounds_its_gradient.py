from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="stage 1 sends its gradient back in bfloat16",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._run_backward_action",
            "        return saved.stage_input.grad\n",
            "        if __planted__(action.stage == 1):\n"
            "            return saved.stage_input.grad.bfloat16().to(saved.stage_input.grad.dtype)\n"
            "        return saved.stage_input.grad\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-tp2-zb-v"),
    cause=("bfloat16", "sends back"),
    tensors=("blocks.0.*",),
    clean=("tp4",),
)
