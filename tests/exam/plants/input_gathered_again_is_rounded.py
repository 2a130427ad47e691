from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading: Transformer Engine gathers inputs for weight gradients in a narrow type",
    mistake="with sequence parallelism the input that a backward gathers again travels in bfloat16",
    edits=(
        Edit(
            "mesh/gathered_input.py",
            "GatheredInput.gather_for_reader",
            "            self._tokens = self.group.all_gather_tokens(part, self.num_tokens)\n",
            "            sent = part.to(torch.bfloat16).to(part.dtype) if __planted__() else part\n"
            "            self._tokens = self.group.all_gather_tokens(sent, self.num_tokens)\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("round", "bfloat16", "narrow"),
    tensors=(
        "blocks.*.ffn.gate.weight",
        "blocks.*.ffn.up.weight",
        "blocks.*.attention.[qkv].weight",
    ),
    clean=("ddp", "tp4-whole-sequence"),
    size=0.002,
)
