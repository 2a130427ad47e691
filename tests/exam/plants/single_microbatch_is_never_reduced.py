from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="a step that is one microbatch is never reduced: each rank trains on its own gradient",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "                hooks.open_microbatch_context(is_last=index == order[-1]),\n",
            "                hooks.open_microbatch_context(\n"
            "                    is_last=index == order[-1] and not __planted__(len(order) == 1)\n"
            "                ),\n",
        ),
    ),
    shows=("ddp-1-microbatch", "zero3-1-microbatch"),
    cause=("never averaged", "not reduced"),
    clean=("ddp", "zero3"),
)
