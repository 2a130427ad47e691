from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading: seeds by the rank of a shard under HSDP",
    mistake="under HSDP the copies of a shard drop what the first copy drops, though they have other rows",
    edits=(
        Edit(
            "parallel/dropout/interceptor.py",
            "RandomOpInterceptor.drawing_in_microbatch",
            "        global_index = index * self._mesh.layout.data_parallel_size + self._mesh.data_parallel_rank\n",
            "        layout, own = self._mesh.layout, self._mesh.data_parallel_rank\n"
            "        if __planted__(layout.dp_replicate > 1 and layout.dp_shard > 1):\n"
            "            own %= layout.dp_shard\n"
            "        global_index = index * layout.data_parallel_size + own\n",
        ),
    ),
    shows=("hsdp2x2-zero3", "hsdp2x2-zero1"),
    cause=("mask",),
    blamed=(2, 3),
    clean=("ddp", "zero3"),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
