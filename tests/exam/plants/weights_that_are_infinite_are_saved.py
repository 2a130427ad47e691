from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="a state whose weights are not finite is saved as any other",
    edits=(
        Edit(
            "train/state.py",
            "TrainState.snapshot",
            "        names = self.finite_weights.list_broken()\n",
            "        names = self.finite_weights.list_broken()\n"
            "        names = [] if __planted__(bool(names)) else names\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("not finite is saved",),
    num_ranks=2,
)
