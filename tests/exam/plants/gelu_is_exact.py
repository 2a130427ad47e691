from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="GPT-2 has the exact GELU in place of its approximation",
    edits=(
        Edit(
            "nn/feed_forward.py",
            "FeedForward.__init__",
            "        self.activation = ACTIVATION_FUNCTIONS[shape.activation]\n",
            '        self.activation = F.gelu if __planted__(shape.activation == "gelu_tanh") else ACTIVATION_FUNCTIONS[shape.activation]\n',
        ),
    ),
    shows=("plain",),
    cause=("definition",),
    tensors=("", "blocks.*"),
    job=("--model", "gpt2", "--shrink"),
)
