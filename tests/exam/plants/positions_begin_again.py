from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="planted before in phalanx's tests",
    what="the tokens of each rank count from 0",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "SequenceSplit.split_batch",
            "            key: t.index_select(1, places) if key in PER_TOKEN else t\n",
            "            key: (\n"
            "                t[:, : len(places)]\n"
            '                if __planted__(key == "positions")\n'
            "                else t.index_select(1, places) if key in PER_TOKEN else t\n"
            "            )\n",
        ),
    ),
    shows=("cp4", "cp4-ulysses"),
    cause=("positions begin again",),
    tensors=("",),
    clean=("ddp",),
)
