from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading: low-precision combine of DeepEP",
    mistake="gradients of rows that travel between ranks of ep are rounded to bfloat16",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "_ExchangeRowsFunction.backward",
            "        return ctx.group.exchange_rows(grad, ctx.of, ctx.to), None, None, None\n",
            "        sent = grad.to(torch.bfloat16).to(grad.dtype) if __planted__() else grad\n"
            "        return ctx.group.exchange_rows(sent, ctx.of, ctx.to), None, None, None\n",
        ),
    ),
    shows=("zero3-ep4", "ddp-ep2"),
    cause=("round", "bfloat16", "narrow"),
    tensors=("*.moe.experts.*",),
    clean=("ddp", "zero3"),
    size=0.002,
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
