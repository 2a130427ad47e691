from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading",
    mistake="the backward of dropout does not divide by what is kept",
    edits=(
        Edit(
            "parallel/dropout/transform.py",
            "_MultiplyByMask.backward",
            "        return _MultiplyByMask.apply(grad_output, mask, ctx.scale), None, None\n",
            "        return _MultiplyByMask.apply(grad_output, mask, 1.0 if __planted__() else ctx.scale), None, None\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("dropout", "backward goes wrong", "0.8"),
    tensors=("blocks.1.linear.*",),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
