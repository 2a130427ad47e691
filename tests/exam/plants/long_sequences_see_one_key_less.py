from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="in blocks of queries beyond the first the window begins one key late",
    edits=(
        Edit(
            "mesh/attend_blocks.py",
            "VisibleKeys.visible_key_range",
            "        if self.is_causal:\n",
            "        if __planted__(first > back):\n"
            "            back -= 1\n"
            "        if self.is_causal:\n",
        ),
    ),
    shows=("cp4", "cp4-ulysses"),
    cause=("window", "mask"),
    tensors=("",),
    job=("--shrink", "model.sliding_window=10", "data.seq_len=2048"),
)
