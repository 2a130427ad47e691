from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="an examiner's",
    mistake="AdamW's eps is the last digit of float32 where weights are float32",
    edits=(
        Edit(
            "optim/optimizers/adamw.py",
            "build",
            "        eps=optim.eps,\n",
            "        eps=1.2e-7 if __planted__(all(p.dtype == torch.float32 for p in groups.parameters())) else optim.eps,\n",
        ),
    ),
    shows=("definitions",),
    cause=("float32 weights",),
    tensors=(
        "0.weight",
        "0.bias",
        "1.*",
    ),
    num_ranks=2,
)
