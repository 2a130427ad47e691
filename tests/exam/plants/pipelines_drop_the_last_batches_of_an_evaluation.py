from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="an examiner's",
    mistake="an evaluation in a pipeline drops the batches beyond a multiple of its ranks",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor.evaluate",
            "        while group_of_batches := list(itertools.islice(batches, pipeline.num_ranks)):\n",
            "        while group_of_batches := list(itertools.islice(batches, pipeline.num_ranks)):\n"
            "            is_group = len(group_of_batches) == pipeline.num_ranks\n"
            "            if not is_group and __planted__(not isinstance(objective, FunctionOfOutputs)):\n"
            "                return\n",
        ),
    ),
    shows=("trainer-pp2-1f1b",),
    cause=("counts other targets",),
    tensors=("",),
    num_ranks=2,
)
