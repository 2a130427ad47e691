from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="a microbatch of an evaluation counts once for each stage that its rank has: the loss is right, and the number of targets is not",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor.evaluate",
            "            yield from outcome\n",
            "            stages = self.staged.stages_of_this_rank\n"
            "            if __planted__(len(stages) > 1 and len(outcome) > 1):\n"
            "                outcome = outcome * len(stages)\n"
            "            yield from outcome\n",
        ),
    ),
    shows=("pp2-zero3-zb-v", "pp2-zero3-interleaved"),
    cause=("evaluation counts",),
    tensors=("",),
    clean=("pp4-1f1b",),
)
