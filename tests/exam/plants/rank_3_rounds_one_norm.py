from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="rank 3 changes its gradient of one norm by one part in 10^8",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "        self._loads.reduce_counts_over_ranks()\n",
            "        self._loads.reduce_counts_over_ranks()\n"
            "        for name, parameter in self._parameters.iterate_optimizer_parameters():\n"
            '            if name.endswith( "blocks.1.ffn_norm.weight") and __planted__(rank=3):\n'
            '                getattr(parameter.grad, "_local_tensor", parameter.grad).mul_(1 + 1e-8)\n',
        ),
    ),
    shows=("ddp", "zero1", "zero3", "tp4"),
    cause=("only rank 3", "rank 3"),
    tensors=("blocks.1.ffn_norm.weight",),
    blamed=(3,),
    size=1e-08,
)
