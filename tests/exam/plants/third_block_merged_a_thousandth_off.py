from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="from the third block of keys on the running sum weighs a thousandth more",
    edits=(
        Edit(
            "parallel/context/block_attention.py",
            "OnlineSoftmaxOutput.merge_block",
            "        self.lse[:, :, rows] = new\n",
            "        self.lse[:, :, rows] = new\n"
            '        seen = vars(self).setdefault("seen", [])\n'
            "        seen.append(rows)\n"
            "        if __planted__(len(seen) > 2):\n"
            "            self.out[:, :, rows] *= 1.001\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("merged", "forward"),
    tensors=("",),
    clean=("cp4-ulysses",),
    size=0.001,
)
