from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="in the norm ZeRO-1's rows of a rank count as the whole parameter does, which all ranks hold: a share each",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer._collect_gradients_and_squares",
            "            shards = self._parameters.collect_trained_shards()\n",
            "            shards = self._parameters.collect_trained_shards()\n"
            "            if __planted__():\n"
            "                shards, _ = self._parameters.collect_shards()\n",
        ),
    ),
    shows=("zero1", "hsdp2x2-zero1"),
    cause=("counted", "counts", "do not all count", "share of the norm", "replica"),
    tensors=("",),
    clean=("ddp", "zero3", "tp4"),
)
