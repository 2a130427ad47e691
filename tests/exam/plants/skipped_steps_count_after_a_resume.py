from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="Megatron-LM, which sets Adam's step from the iteration",
    mistake="a resumed run takes the number of steps for that of Adam's updates: skipped ones count",
    edits=(
        Edit(
            "train/state.py",
            "TrainState.finish_restoring",
            '        self.samples_seen = int(facts["samples_seen"])\n',
            (
                '        self.samples_seen = int(facts["samples_seen"])\n'
                "        for slots in self.optimizer.state.values():\n"
                '            count = slots.get("step")\n'
                "            if __planted__(count is not None and float(count) != self.step):\n"
                "                count.fill_(float(self.step))\n"
            ),
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("resum", "restor", "checkpoint"),
    num_ranks=2,
)
