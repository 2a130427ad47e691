from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="DeepSpeed 5999fb0 (#7985)",
    mistake="the last microbatch's gradient is added after the reduction",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "index == order[-1]",
            "index == order[max(0, len(order) - (2 if __planted__() else 1))]",
        ),
    ),
    shows=("ddp", "zero2", "zero3"),
    cause=("never averaged", "not reduced", "microbatch", "own part"),
    clean=("pp4-1f1b",),
)
