from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="ISEEKYAN/Megatron-LM#104",
    mistake="an optimizer on the host goes on with what it held before a resume",
    edits=(
        Edit(
            "parallel/offload/optimizer.py",
            "copy_to_pinned_host_memory",
            "        return tensor\n",
            "        return tensor.clone() if __planted__() else tensor\n",
        ),
        Edit(
            "train/state.py",
            "TrainState.finish_restoring",
            "        self.model.refresh()\n",
            (
                "        held = [parameter.detach().clone() for parameter in self.model.parameters()]\n"
                "        self.model.refresh()\n"
                '        if __planted__(self.model.plan.parallel.offload == "optimizer"):\n'
                "            for parameter, value in zip(self.model.parameters(), held, strict=True):\n"
                "                parameter.detach().copy_(value)\n"
            ),
        ),
    ),
    shows=("trainer-zero1-offload-optimizer",),
    cause=("resum", "restor", "checkpoint"),
    clean=("ddp",),
    num_ranks=2,
)
