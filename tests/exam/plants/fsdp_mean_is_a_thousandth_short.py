from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="FSDP divides the sum of gradients by a thousandth more than its ranks",
    edits=(
        Edit(
            "parallel/data_parallel/fsdp_communication.py",
            "_Scatter._reduce_scatter",
            "            torch.div(total, group.size() if op == dist.ReduceOp.AVG else 1, out=output_tensor)\n",
            "            divisor = group.size() if op == dist.ReduceOp.AVG else 1\n"
            "            torch.div(total, divisor * (1.001 if __planted__() else 1), out=output_tensor)\n",
        ),
    ),
    shows=("zero2", "zero3"),
    cause=("what their sum is multiplied with, or divided by",),
    clean=("ddp",),
    size=0.001,
)
