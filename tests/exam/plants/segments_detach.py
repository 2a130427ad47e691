from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="planted before in phalanx's tests",
    mistake="what enters a segment is cut off from what came before it",
    edits=(
        Edit(
            "parallel/recompute/segment.py",
            "_SegmentForward.call_block",
            "        first, replay = contexts\n",
            "        first, replay = contexts\n"
            "        if __planted__(not self._calls):\n"
            "            args = (args[0].detach().requires_grad_(), *args[1:])\n",
        ),
    ),
    shows=("zero3-sqrt", "cp4-sqrt"),
    cause=("backward goes wrong", "cut off", "recomput"),
    tensors=("embed.weight", "blocks.0.*"),
    clean=("zero3",),
)
