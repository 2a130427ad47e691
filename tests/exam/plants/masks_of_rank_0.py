from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="planted before in phalanx's tests",
    mistake="every rank drops as if its rows were those of rank 0",
    edits=(
        Edit(
            "parallel/dropout/interceptor.py",
            "RandomOpInterceptor.drawing_in_microbatch",
            "        global_index = index * self._mesh.layout.data_parallel_size + self._mesh.data_parallel_rank\n",
            "        rank = 0 if __planted__() else self._mesh.data_parallel_rank\n"
            "        global_index = index * self._mesh.layout.data_parallel_size + rank\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("those of the others are not",),
    tensors=("blocks.0.drop",),
    blamed=(1, 2, 3),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
