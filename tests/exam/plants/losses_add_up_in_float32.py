from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="losses of microbatches add up in float32",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel._zero_loss_sum",
            "        return torch.zeros((), dtype=torch.float64, device=self.mesh.device)\n",
            "        dtype = torch.float32 if __planted__() else torch.float64\n        return torch.zeros((), dtype=dtype, device=self.mesh.device)\n",
        ),
    ),
    shows=("ddp", "zero3"),
    tensors=("",),
    size=6e-08,
    cause=("the sum of those of microbatches",),
)
