from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="NeMo Automodel#3247",
    mistake="loads of experts are counted in the forward: once more where a block is recomputed",
    edits=(
        Edit(
            "nn/routing.py",
            "_AddBalanceGradient.forward",
            "        ctx.router, ctx.shape = router, shares_BTE.shape\n",
            (
                "        ctx.router, ctx.shape = router, shares_BTE.shape\n"
                "        if __planted__():\n"
                "            router.load.add(counts_E, dropped)\n"
            ),
        ),
        Edit(
            "nn/routing.py",
            "_AddBalanceGradient.backward",
            "        ctx.router.load.add(counts_E, dropped)\n",
            ("        if not __planted__():\n            ctx.router.load.add(counts_E, dropped)\n"),
        ),
    ),
    shows=("zero3-ep4-full", "zero3-full"),
    cause=("2 x", "twice", "recomput", "more than once"),
    tensors=("*router*",),
    clean=("zero3-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
