from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="an examiner's",
    mistake="in bf16 the head's gradient is rounded with each chunk of logits that is added to it",
    edits=(
        Edit(
            "nn/objective.py",
            "_ChunkedCrossEntropy.forward",
            "            grad_head = torch.zeros(head_VD.shape, dtype=wide, device=head_VD.device)\n",
            "            grad_head = torch.zeros(\n"
            "                head_VD.shape, dtype=hidden_ND.dtype if __planted__() else wide, device=head_VD.device\n"
            "            )\n",
        ),
    ),
    shows=("definitions",),
    cause=("so many times one part",),
    tensors=("the head*",),
    num_ranks=2,
)
