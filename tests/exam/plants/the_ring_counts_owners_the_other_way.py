from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading: ring attention of more than two ranks",
    mistake="keys that come around the ring are taken for those of the rank behind, and masked as these",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_RingExchange.iterate_key_value_blocks",
            "            yield (group.rank - step) % group.size, kv\n",
            "            owner = group.rank + step if __planted__(group.size > 2) else group.rank - step\n            yield owner % group.size, kv\n",
        ),
    ),
    shows=("cp4",),
    clean=("ddp-cp2", "cp4-all-gather"),
    tensors=("", "*"),
    cause=("the keys of another rank", "order of their owners"),
)
