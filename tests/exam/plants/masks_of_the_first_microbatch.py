from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading",
    mistake="every microbatch drops what the first one dropped",
    edits=(
        Edit(
            "parallel/dropout/interceptor.py",
            "RandomOpInterceptor.drawing_in_microbatch",
            "        global_index = index * self._mesh",
            "        index = 0 if __planted__() else index\n"
            "        global_index = index * self._mesh",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("masks",),
    tensors=("blocks.0.drop",),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
