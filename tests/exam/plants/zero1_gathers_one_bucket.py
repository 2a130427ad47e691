from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="of the updated rows only the first bucket is gathered",
    edits=(
        Edit(
            "parallel/data_parallel/zero1.py",
            "UpdatedParameterGather._gather_by_buckets",
            "        for spans in self._buckets:\n",
            "        for spans in self._buckets[:1] if __planted__(len(self._buckets) > 1) else self._buckets:\n",
        ),
    ),
    shows=("zero1", "hsdp2x2-zero1"),
    cause=("stale", "replica", "other weights"),
    clean=("zero2",),
)
