from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading: receive buffers that are used again",
    mistake="from the second step on the third microbatch of a stage computes with what arrived in the step before",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._run_forward_action",
            "            # What arrives is a leaf: its gradient is what goes back to the stage before.\n"
            "            stage_input.requires_grad_()\n",
            '            kept = self.__dict__.setdefault("_kept_inputs", {})\n'
            "            before = kept.get(action.stage)\n"
            "            if action.microbatch == 2:\n"
            "                kept[action.stage] = stage_input.detach().clone()\n"
            "                if __planted__(before is not None and before.shape == stage_input.shape):\n"
            "                    stage_input = before\n"
            "            # What arrives is a leaf: its gradient is what goes back to the stage before.\n"
            "            stage_input.requires_grad_()\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    cause=("microbatch", "step before", "last step", "hidden states", "arriv", "message"),
    tensors=("",),
    clean=("ddp", "zero3"),
)
