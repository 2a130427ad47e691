from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="the first weight that rank 3 hands to a gather is off by one part in a million",
    edits=(
        Edit(
            "parallel/data_parallel/fsdp_communication.py",
            "_Gather.__call__",
            "                rank_rows.copy_(input_tensor.view(-1))\n",
            "                rank_rows.copy_(input_tensor.view(-1))\n"
            "            if __planted__(group.size() == 4, rank=3):\n"
            "                rank_rows[0] *= 1 + 1e-6\n",
        ),
    ),
    shows=("zero3", "zero3-full"),
    cause=("forward", "stale", "other weights"),
    clean=("ddp",),
    size=1e-06,
)
