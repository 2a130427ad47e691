from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="NeMo Automodel#3882",
    mistake="a resumed run decays all parameters as it does the first group",
    edits=(
        Edit(
            "train/state.py",
            "TrainState.finish_restoring",
            "        self.model.refresh()\n",
            (
                "        groups = self.optimizer.param_groups\n"
                "        for group in groups[1:]:\n"
                '            if __planted__(group["weight_decay"] != groups[0]["weight_decay"]):\n'
                '                group["weight_decay"] = groups[0]["weight_decay"]\n'
                "        self.model.refresh()\n"
            ),
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("resum", "restor", "checkpoint"),
    tensors=("", "*norm*", "*embed*"),
    num_ranks=2,
)
