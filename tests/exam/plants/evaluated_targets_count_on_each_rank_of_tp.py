from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading",
    mistake="an evaluation adds up loss and targets of each rank of tp: their ratio is right, their number is not",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_sums",
            "        vector = torch.stack(self._zero_unless_tp_leader(local_loss))\n",
            "        vector = torch.stack(self._zero_unless_tp_leader(local_loss))\n"
            "        if __planted__():\n"
            "            vector = torch.stack((local_loss.loss_sum, local_loss.num_targets))\n",
        ),
    ),
    shows=("trainer-tp2-zero3",),
    cause=("targets",),
    tensors=("",),
    clean=("trainer-ddp",),
)
