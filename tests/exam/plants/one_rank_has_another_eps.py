from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="RMSNorm of rank 2 has ten times the eps",
    edits=(
        Edit(
            "nn/norms.py",
            "RMSNorm.forward",
            "weight.to(x.dtype), self.eps)",
            "weight.to(x.dtype), self.eps * (10 if __planted__(rank=2) else 1))",
        ),
    ),
    shows=("zero3", "ddp", "tp4"),
    cause=("rank 2", "forward"),
    tensors=("", "*"),
    blamed=(2,),
)
