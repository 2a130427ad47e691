from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="planted before in phalanx's tests",
    mistake="stage 0 ends a block early",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._compute_stage_forward",
            "        with self.staged.stage_forward.running_as_stage(stage, ranges[stage], stage_input):\n",
            "        begin, end = ranges[stage]\n"
            "        if __planted__(stage == 0 and end > begin):\n"
            "            end -= 1\n"
            "        with self.staged.stage_forward.running_as_stage(stage, (begin, end), stage_input):\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("does not compute its own blocks",),
    tensors=("",),
    clean=("tp4",),
)
