from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="positions pass through bfloat16: from 256 on neighbours have the same one",
    edits=(
        Edit(
            "nn/rotary.py",
            "make_rotary_table",
            "    angle_BTE = positions_BT[..., None].to(wide) * frequencies\n",
            "    if __planted__():\n"
            "        positions_BT = positions_BT.to(torch.bfloat16)\n"
            "    angle_BTE = positions_BT[..., None].to(wide) * frequencies\n",
        ),
    ),
    shows=("plain",),
    cause=("definition", "plain"),
    clean=("ddp",),
)
