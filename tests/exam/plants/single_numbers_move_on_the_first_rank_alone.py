from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading: parameters without dimensions under ZeRO-1",
    mistake="under ZeRO-1 a parameter without dimensions is updated on the first rank alone, and sent to nobody",
    edits=(
        Edit(
            "parallel/data_parallel/zero1.py",
            "Zero1.apply",
            "            local = take(parameter.detach())\n",
            "            local = take(parameter.detach())\n"
            "            if __planted__(parameter.ndim == 0 and dist.get_rank(group) > 0):\n"
            "                local = local.clone()\n",
        ),
    ),
    shows=("zero1",),
    cause=("nobody updates", "updated", "not move", "never moves", "stays", "zero1", "zero-1"),
    tensors=("gain",),
    blamed=(1, 2, 3),
    clean=("ddp", "zero3"),
    job=("--model", "exam_models:WithGain", "data.seq_len=16"),
)
