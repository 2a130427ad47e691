from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="DeepSpeed d99a642 (#8154)",
    mistake="every stage halves the gradient that it sends back",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._run_backward_action",
            "        return saved.stage_input.grad\n",
            "        return saved.stage_input.grad / (2 if __planted__() else 1)\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("sends back", "0.5", "divided", "stage"),
    tensors=("blocks.2.*", "blocks.1.*"),
    clean=("tp4",),
)
