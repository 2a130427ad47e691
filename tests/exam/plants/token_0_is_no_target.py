from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading: padding that is masked by its token, where that is a word as well",
    mistake="a target that is token 0 is taken for padding and masked",
    edits=(
        Edit(
            "nn/objective.py",
            "_sum_causal_cross_entropy",
            '    targets_N = batch["targets"].flatten()\n',
            '    targets_N = batch["targets"].flatten()\n'
            "    if __planted__(bool((targets_N == 0).any())):\n"
            "        targets_N = targets_N.masked_fill(targets_N == 0, IGNORE_INDEX)\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("target", "masked", "-100"),
    tensors=("", "targets"),
)
