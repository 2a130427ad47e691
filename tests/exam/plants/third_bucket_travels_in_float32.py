from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: a bucket's communication type",
    mistake="from the third bucket of DDP on gradients are rounded to float32 before their reduction",
    edits=(
        Edit(
            "parallel/data_parallel/shared_buckets.py",
            "SharedBucketReduction._post",
            "        self._publish(index, buffer)\n",
            "        self._publish(index, buffer)\n"
            "        if __planted__(index >= 2):\n"
            "            buffer.copy_(buffer.float())\n",
        ),
    ),
    shows=("ddp", "zero1"),
    cause=("round", "float32", "narrow"),
    clean=("zero3", "tp4"),
    size=6e-08,
)
