from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="planted before in phalanx's tests",
    mistake="rank 1 keeps a part of its own gradient of one tensor",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "        self._loads.reduce_counts_over_ranks()\n",
            "        self._loads.reduce_counts_over_ranks()\n"
            "        for name, parameter in self._parameters.iterate_optimizer_parameters():\n"
            '            if name.endswith( "blocks.1.ffn.up.weight") and __planted__(rank=1):\n'
            '                local = getattr(parameter.grad, "_local_tensor", parameter.grad)\n'
            "                local[::2] *= 1.1\n",
        ),
    ),
    shows=("ddp", "zero3", "tp4"),
    cause=("only rank 1", "rank 1"),
    tensors=("blocks.1.ffn.up.weight",),
    blamed=(1,),
)
