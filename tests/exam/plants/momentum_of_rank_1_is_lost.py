from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="Megatron-LM 76d26e2",
    mistake="rank 1 forgets the first moment of one tensor before each update",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.update",
            "        optimizer.step()\n",
            "        for slots in list(optimizer.state.values())[2:3]:\n"
            '            if __planted__("exp_avg" in slots, rank=1):\n'
            '                slots["exp_avg"].zero_()\n'
            "        optimizer.step()\n",
        ),
    ),
    shows=("zero3", "ddp", "tp4"),
    cause=("its first moment (momentum) were lost",),
    tensors=("blocks.0.attention.v.weight",),
    blamed=(1,),
)
