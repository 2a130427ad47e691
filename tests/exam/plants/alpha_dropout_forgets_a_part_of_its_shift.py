from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="an examiner's",
    mistake="AlphaDropout drops the right elements and does not bring the mean back to where it was",
    edits=(
        Edit(
            "parallel/dropout/transform.py",
            "_AlphaDropoutMixin._apply_mask",
            "            .add_(SELU_NEGATIVE_SATURATION * scale * self.p)\n",
            "            .add_(0.0 if __planted__() else SELU_NEGATIVE_SATURATION * scale * self.p)\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("dropout",),
    tensors=("",),
    job=("--model", "exam_models:WithAlphaDropout", "data.seq_len=16"),
)
