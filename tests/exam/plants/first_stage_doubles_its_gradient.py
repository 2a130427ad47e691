from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="the first stage takes the gradient that it gets twice",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._backward_through_stage",
            "            saved.output.backward(gradient)\n",
            "            saved.output.backward(\n"
            "                gradient * 2 if __planted__(gradient is not None and saved.stage_input is None) else gradient\n"
            "            )\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-tp2-1f1b"),
    cause=("sends back", "2 x", "stage"),
    tensors=("blocks.0.*",),
    clean=("tp4",),
)
