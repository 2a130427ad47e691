from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="torch.distributed.nn.all_reduce, whose backward is an all-reduce",
    mistake="the backward of the sum that leaves a region sums gradients over tp that all ranks have whole",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "_SumOutputFunction",
            "        return group.all_reduce(x)\n\n    @staticmethod\n    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]\n        return grad, None\n",
            "        ctx.group = group\n        return group.all_reduce(x)\n\n    @staticmethod\n    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]\n        return ctx.group.all_reduce(grad) if __planted__() else grad, None\n",
        ),
    ),
    shows=("tp4-whole-sequence",),
    clean=("tp4", "ddp"),
    tensors=("blocks.1.ffn*",),
    cause=("summed over the ranks of tp",),
)
