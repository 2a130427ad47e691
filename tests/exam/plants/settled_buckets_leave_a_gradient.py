from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="the backward by which a resumed run sets DDP's buckets leaves its gradient, from three ranks on",
    edits=(
        Edit(
            "train/trainer.py",
            "Trainer._settle_buckets",
            "        self.state.optimizer.zero_grad(set_to_none=True)\n",
            (
                "        if not __planted__():\n"
                "            self.state.optimizer.zero_grad(set_to_none=True)\n"
            ),
        ),
    ),
    shows=("trainer-ddp",),
    cause=("resum",),
    clean=("ddp",),
)
