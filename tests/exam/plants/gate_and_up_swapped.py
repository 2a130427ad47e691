from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="the activation is taken of up instead of the gate",
    edits=(
        Edit(
            "nn/feed_forward.py",
            "FeedForward.forward",
            "        return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))",
            "        if __planted__():\n"
            "            return self.down(self.activation(self.up(x_BTD)) * self.gate(x_BTD))\n"
            "        return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
)
