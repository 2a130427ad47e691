from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="attention over blocks of keys is merged in bf16",
    edits=(
        Edit(
            "parallel/context/block_attention.py",
            "OnlineSoftmaxOutput.make_empty",
            "        out = torch.zeros(q_BHTE.shape, dtype=wide, device=q_BHTE.device)\n",
            "        narrow = q_BHTE.dtype if __planted__() else wide\n"
            "        out = torch.zeros(q_BHTE.shape, dtype=narrow, device=q_BHTE.device)\n",
        ),
    ),
    shows=("definitions",),
    cause=("so many times one part",),
    tensors=("attention's output*",),
    num_ranks=2,
)
