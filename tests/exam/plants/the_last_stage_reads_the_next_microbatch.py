from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="NeMo, Megatron: data iterators of stages that come apart (own reading)",
    mistake="the last stage of a pipeline takes targets (and positions) of the microbatch that comes next",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._run_scheduled_action",
            "                    action, stage_input, microbatches[action.microbatch], objective, step, add\n",
            "                    action,\n                    stage_input,\n                    microbatches[\n                        (\n                            action.microbatch\n                            + __planted__(action.stage + 1 == self.staged.pipeline.num_stages)\n                        )\n                        % len(microbatches)\n                    ],\n                    objective,\n                    step,\n                    add,\n",
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    clean=("ddp",),
    tensors=("",),
    cause=("another microbatch than that of its hidden states",),
)
