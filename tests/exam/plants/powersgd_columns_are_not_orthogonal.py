from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="own reading: powersgd with normalised columns",
    mistake="powersgd scales the columns of P to length 1 and does not make them orthogonal",
    edits=(
        Edit(
            "parallel/hooks/powersgd.py",
            "PowerSgd.reduce",
            "        ps = [torch.linalg.qr(p).Q for p in ps]\n",
            "        ps = [\n"
            "            p / p.norm(dim=0).clamp(min=1e-30) if __planted__() else torch.linalg.qr(p).Q\n"
            "            for p in ps\n"
            "        ]\n",
        ),
    ),
    shows=("ddp-powersgd",),
    cause=("power iteration", "powersgd", "orthogon"),
    clean=("ddp", "ddp-topk", "ddp-int8"),
)
