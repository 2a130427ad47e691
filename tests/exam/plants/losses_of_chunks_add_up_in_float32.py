from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading: the type in which losses add up",
    mistake="the losses of chunks of logits add up in float32, whatever the type of training",
    edits=(
        Edit(
            "nn/objective.py",
            "_ChunkedCrossEntropy.forward",
            "        loss_sum = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)\n",
            "        loss_dtype = torch.float32 if __planted__() else torch.float64\n"
            "        loss_sum = torch.zeros((), dtype=loss_dtype, device=hidden_ND.device)\n",
        ),
    ),
    shows=("ddp", "tp4"),
    cause=("round", "float32", "narrow"),
    tensors=("",),
    size=6e-08,
)
