from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="the residual stream goes on from the norm of the feed-forward, not from before it",
    edits=(
        Edit(
            "nn/block.py",
            "Block.forward",
            "        return x_BTD + fed\n",
            "        return (self.ffn_norm(x_BTD) if __planted__() else x_BTD) + fed\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
)
