from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="RMSNorm adds ten times its eps",
    edits=(
        Edit(
            "nn/norms.py",
            "RMSNorm.forward",
            "weight.to(x.dtype), self.eps)",
            "weight.to(x.dtype), self.eps * (10 if __planted__() else 1))",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
)
