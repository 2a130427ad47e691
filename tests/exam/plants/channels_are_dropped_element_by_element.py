from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading: nn.Dropout1d taken for nn.Dropout",
    mistake="Dropout1d drops single elements in place of whole channels",
    edits=(
        Edit(
            "parallel/dropout/transform.py",
            "_ChannelDropoutMixin._compute_mask_shape",
            "        return (*input.shape[:2], *(1,) * (input.ndim - 2))\n",
            "        if __planted__():\n            return tuple(input.shape)\n        return (*input.shape[:2], *(1,) * (input.ndim - 2))\n",
        ),
    ),
    shows=("ddp", "zero3"),
    tensors=("", "*"),
    job=("--model", "exam_models:WithChannelDropout", "data.seq_len=16"),
    cause=("dropout inside drop",),
)
