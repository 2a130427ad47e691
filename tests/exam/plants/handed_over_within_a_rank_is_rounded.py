from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading: V schedules, whose neighbours may lie on one rank",
    mistake="a gradient that stays on its rank, from one stage of a V to the one before, is rounded to bfloat16",
    edits=(
        Edit(
            "parallel/pipeline/p2p.py",
            "P2PQueue.send",
            "            self._local[message] = tensor\n",
            "            if __planted__(message.is_gradient):\n"
            "                tensor = tensor.to(torch.bfloat16).to(tensor.dtype)\n"
            "            self._local[message] = tensor\n",
        ),
    ),
    shows=("pp2-zero3-zb-v", "pp2-tp2-zb-v"),
    cause=("round", "bfloat16", "narrow"),
    tensors=("blocks.*", "embed.weight"),
    clean=("pp4-1f1b", "pp2-zero3-interleaved", "pp2-zero3-1f1b"),
    size=0.002,
)
