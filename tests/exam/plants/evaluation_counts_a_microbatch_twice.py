from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="of the microbatches of an evaluation in a pipeline the last is the first again",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor.evaluate",
            "            yield from outcome\n",
            (
                "            if __planted__(len(outcome) > 1):\n"
                "                outcome[-1] = outcome[0]\n"
                "            yield from outcome\n"
            ),
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("forward without gradients",),
    tensors=("",),
)
