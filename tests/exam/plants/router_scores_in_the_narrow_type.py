from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="a router computes its scores in the type of the rest, bf16, and not in float32",
    edits=(
        Edit(
            "nn/routing.py",
            "Router.forward",
            "        wide = torch.promote_types(x_BTD.dtype, torch.float32)\n",
            "        wide = torch.promote_types(x_BTD.dtype, torch.float32)\n"
            "        if __planted__(x_BTD.dtype == torch.bfloat16):\n"
            "            wide = x_BTD.dtype\n",
        ),
    ),
    shows=("ddp", "zero3-ep2"),
    cause=("fewer digits", "implementation", "phalanx.nn"),
    tensors=("*.moe.router.weight",),
    num_ranks=2,
    job=("--model", "small-mixtral", "--shrink", "precision.compute=bf16"),
)
