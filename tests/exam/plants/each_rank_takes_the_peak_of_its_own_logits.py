from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="Megatron's vocab_parallel_cross_entropy without its max (own reading)",
    mistake="ranks that have parts of the vocabulary do not agree on a row's largest logit",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "VocabularyShard.max_over_ranks",
            '        return self.group.all_reduce(x, "max")\n',
            '        return x if __planted__() else self.group.all_reduce(x, "max")\n',
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    clean=("ddp",),
    tensors=("", "head.weight"),
    cause=("maximum over the ranks of tp",),
)
