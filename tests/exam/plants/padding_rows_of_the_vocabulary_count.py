from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading: Megatron-LM pads the vocabulary to a multiple of tp",
    mistake="where tp cuts the vocabulary unevenly a row of padding, whose logit is 0, counts in the softmax of the loss",
    edits=(
        Edit(
            "nn/objective.py",
            "_sum_loss_and_write_gradient",
            "    norm = logits_NV.sum(dim=1)\n",
            "    norm = logits_NV.sum(dim=1)\n"
            "    missing = 0 if vocabulary is None else max(vocabulary.sizes) - logits_NV.shape[1]\n"
            "    if __planted__(missing > 0):\n"
            "        norm = norm + missing * torch.exp(-peak)\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("vocabulary", "softmax", "exponential", "cut head", "cuts the head"),
    tensors=("",),
    clean=("ddp", "zero3"),
)
