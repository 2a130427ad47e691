from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="own reading",
    mistake="from step 5 on weights in float32 are rounded to bfloat16 after an update",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.update",
            "        optimizer.step()\n",
            "        optimizer.step()\n"
            "        for parameter in self.parameters():\n"
            "            held = getattr(parameter, '_local_tensor', parameter).detach()\n"
            "            if __planted__(self.step >= 5 and held.dtype is torch.float32):\n"
            "                held.copy_(held.bfloat16())\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("rounded to bfloat16",),
)
