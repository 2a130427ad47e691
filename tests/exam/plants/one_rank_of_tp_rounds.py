from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="Megatron-LM c2c36f7 (!3999)",
    mistake="the second rank of tp rounds what leaves its regions to float32",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "TensorParallelGroup.leave",
            "        output: torch.Tensor = leave.apply(x, self)\n",
            "        if __planted__(self.rank == 1):\n"
            "            x = x.float().to(x.dtype)\n"
            "        output: torch.Tensor = leave.apply(x, self)\n",
        ),
    ),
    shows=("tp4", "tp2-cp2"),
    cause=("float32",),
    tensors=("", "*"),
    clean=("ddp",),
    size=6e-08,
)
