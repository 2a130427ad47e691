from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="what rank 3 updated arrives at rank 0 a step late",
    edits=(
        Edit(
            "parallel/data_parallel/zero1.py",
            "_ParameterSpanInBucket.read_from_bucket",
            "                self.flat[first:end] = row[self.offset : self.offset + end - first]\n",
            "                arrived = row[self.offset : self.offset + end - first].clone()\n"
            "                if __planted__(other == 3, rank=0):\n"
            "                    late = vars(_ParameterSpanInBucket.read_from_bucket)\n"
            '                    key = f"{self.flat.data_ptr()} {first}"\n'
            "                    arrived, late[key] = late.get(key, arrived), arrived\n"
            "                self.flat[first:end] = arrived\n",
        ),
    ),
    shows=("zero1",),
    cause=("stale", "replica", "other weights"),
    blamed=(0,),
    clean=("zero2",),
)
