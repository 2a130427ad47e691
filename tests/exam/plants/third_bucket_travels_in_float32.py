from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: a bucket's communication type",
    mistake="from the third bucket of DDP on gradients are rounded to float32 before their reduction",
    edits=(
        Edit(
            "parallel/data_parallel/ddp_buckets.py",
            "PostedBuckets._post_bucket",
            "        self._publish(bucket.index(), buffer)\n",
            "        self._publish(bucket.index(), buffer)\n"
            "        if __planted__(bucket.index() >= 2):\n"
            "            buffer.copy_(buffer.float())\n",
        ),
    ),
    shows=("ddp", "zero1"),
    cause=("round", "float32", "narrow"),
    clean=("zero3", "tp4"),
    size=6e-08,
)
