from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="planted before in phalanx's tests",
    mistake="tokens see more than the window",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelMaskBuilder.__call__",
            "        total, size = num_tokens * self.group.size, self.group.size\n",
            "        total, size = num_tokens * self.group.size, self.group.size\n"
            "        window = 0 if __planted__() else window\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("window",),
    tensors=("",),
    clean=("ddp",),
    job=("--shrink", "model.sliding_window=10"),
)
