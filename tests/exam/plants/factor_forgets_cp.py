from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="Megatron-LM 3bdcbbb (!1923)",
    mistake="the factor of gradients is that of data parallelism without cp",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "        num_ranks = self._context.plan.layout.gradient_reduction_layout.data_parallel_size\n",
            "        num_ranks = self._context.plan.layout.gradient_reduction_layout.data_parallel_size\n"
            "        if __planted__(self._context.plan.layout.cp > 1):\n"
            "            num_ranks = self._context.plan.layout.data_parallel_size\n",
        ),
    ),
    shows=("cp4", "ddp-cp2"),
    cause=("cp", "divided"),
    clean=("ddp", "tp4"),
)
