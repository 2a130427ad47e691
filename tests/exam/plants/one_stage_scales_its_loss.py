from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="Megatron-LM ba456fd (#3023)",
    mistake="in a pipeline the loss is divided by the targets that are counted for one rank too many",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._run_forward_action",
            "            outcome = self.context.normalizer.scale_loss(loss)\n",
            "            outcome = self.context.normalizer.scale_loss(loss) / (1.25 if __planted__() else 1)\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-zb-v"),
    cause=("0.8", "divided"),
    clean=("tp4", "zero3"),
)
