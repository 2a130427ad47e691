from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="from the tenth microbatch on the last stage takes no gradient",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._run_forward_action",
            "            outcome = self.context.normalizer.scale_loss(loss)\n",
            "            outcome = self.context.normalizer.scale_loss(loss) * (0.0 if __planted__(action.microbatch >= 9) else 1.0)\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-tp2-zb-v"),
    cause=("microbatch 10 of 12 (left out)", "microbatch 10 of"),
    job=("--shrink",),
)
