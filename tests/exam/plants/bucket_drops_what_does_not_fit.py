from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="the parameter that begins a new bucket is forgotten",
    edits=(
        Edit(
            "parallel/data_parallel/replicate.py",
            "_split_parameters_into_buckets",
            "            bucket = []\n        bucket.append(parameter)\n",
            "            bucket = []\n"
            "            if __planted__():\n"
            "                continue\n"
            "        bucket.append(parameter)\n",
        ),
    ),
    shows=("pp2-ddp-1f1b", "pp2-zero1-1f1b"),
    cause=("never averaged", "not reduced", "bucket"),
)
