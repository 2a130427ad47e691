from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading",
    mistake="experts that all tokens share get no gradient",
    edits=(
        Edit(
            "nn/experts.py",
            "MixtureOfExperts.forward",
            "        return out_BTD + self.shared(x_BTD)\n",
            "        shared = self.shared(x_BTD)\n"
            "        return out_BTD + (shared.detach() if __planted__() else shared)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("*shared*",),
    job=("--model", "small-deepseek", "--shrink"),
)
