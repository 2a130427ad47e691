from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading: rows of microbatches in a pipeline",
    mistake="in a pipeline dropout takes each microbatch for one of rows further on, as if stages had rows of their own",
    edits=(
        Edit(
            "parallel/dropout/interceptor.py",
            "RandomOpInterceptor.drawing_in_microbatch",
            "        global_index = index * self._mesh.layout.data_parallel_size + self._mesh.data_parallel_rank\n",
            "        size = self._mesh.layout.data_parallel_size\n"
            "        if __planted__(self._mesh.layout.pp > 1 and index > 0):\n"
            "            size *= self._mesh.layout.pp\n"
            "        global_index = index * size + self._mesh.data_parallel_rank\n",
        ),
    ),
    shows=("pp2-ddp-1f1b", "pp2-zero3-1f1b"),
    cause=("mask",),
    clean=("ddp", "zero3"),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
