from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="planted before in phalanx's tests",
    mistake="blocks of keys are added up as they are",
    edits=(
        Edit(
            "parallel/context/block_attention.py",
            "OnlineSoftmaxOutput.merge_block",
            "        self.out[:, :, rows] = self.out[:, :, rows] * old_weight + out * added\n",
            "        self.out[:, :, rows] = self.out[:, :, rows] * (1 if __planted__() else old_weight) + out * added\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("merged",),
    tensors=("",),
    clean=("cp4-ulysses",),
)
