from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading: Megatron-LM's all-reduce of position embeddings under sequence parallelism",
    mistake="with sequence parallelism the gradient of learned positions stays that of a rank's own tokens",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "ModuleSharder.list_parameters_with_partial_gradients",
            '                and self._has_partial_gradient(full.rpartition(".")[0], full)\n',
            '                and self._has_partial_gradient(full.rpartition(".")[0], full)\n'
            '                and not __planted__(self.group.cuts_sequence and full.startswith("embed_positions"))\n',
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=(
        "summed over",
        "sum over",
        "not summed",
        "partial",
        "part of the sequence",
        "own tokens",
        "added up",
    ),
    tensors=("embed_positions.weight",),
    clean=("ddp", "tp4-whole-sequence"),
    job=("--model", "gpt2", "--shrink"),
)
