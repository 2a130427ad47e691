from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="1-bit Adam, DeepSpeed: error feedback that no checkpoint brings back",
    mistake="a resumed run takes what gradients had not sent for another layout's and begins with nothing",
    edits=(
        Edit(
            "train/state.py",
            "TrainState._drop_compression_state_of_other_layout",
            "        if expected == stored or (is_stage and expected.items() <= stored.items()):\n",
            "        is_own = expected == stored or (is_stage and expected.items() <= stored.items())\n        if is_own and not __planted__(bool(stored)):\n",
        ),
    ),
    shows=("trainer-ddp-powersgd",),
    clean=("ddp-powersgd",),
    cause=("not restored from the checkpoint",),
)
