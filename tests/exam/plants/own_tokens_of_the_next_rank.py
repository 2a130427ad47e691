from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="Megatron-LM#7452 f.7",
    mistake="with learned positions a rank takes the next rank's part of the sequence",
    edits=(
        Edit(
            "mesh/tensor_group.py",
            "TensorParallelGroup.select_tokens_of_rank",
            "        return padded.narrow(SEQUENCE_DIM, self.rank * length, length)\n",
            "        rank = (self.rank + 1) % self.size if __planted__() else self.rank\n"
            "        return padded.narrow(SEQUENCE_DIM, rank * length, length)\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("cut", "position", "sequence"),
    tensors=("",),
    clean=("tp4-whole-sequence",),
    job=("--model", "gpt2", "--shrink"),
)
