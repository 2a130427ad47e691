from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: DeepSpeed's and FSDP's divisions by a part of the data-parallel ranks",
    mistake="under HSDP gradients are multiplied by the ranks of dp_shard alone, and so are half as large",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "        num_ranks = self._context.plan.layout.gradient_reduction_layout.data_parallel_size\n",
            "        reducing = self._context.plan.layout.gradient_reduction_layout\n"
            "        num_ranks = reducing.data_parallel_size\n"
            "        if __planted__(reducing.dp_replicate > 1 and reducing.dp_shard > 1):\n"
            "            num_ranks = reducing.dp_shard\n",
        ),
    ),
    shows=("hsdp2x2-zero1", "hsdp2x2-zero2", "hsdp2x2-zero3"),
    cause=("dp_replicate", "hsdp", "copies", "averaged", "divided", "half of"),
    clean=("ddp", "zero1", "zero3"),
    size=0.5,
)
