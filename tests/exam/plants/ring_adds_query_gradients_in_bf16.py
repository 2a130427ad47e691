from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="in bf16 the gradient of queries is rounded with each rank's keys",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_BlockwiseAttentionFunction.backward",
            "torch.zeros(q.shape, dtype=lse.dtype, device=q.device)",
            "torch.zeros(q.shape, dtype=q.dtype if __planted__() else lse.dtype, device=q.device)",
        ),
    ),
    shows=("definitions",),
    cause=("so many times one part",),
    tensors=("the gradient of queries*",),
    num_ranks=2,
)
