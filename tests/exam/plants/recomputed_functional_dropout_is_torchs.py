from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading: F.dropout inside of a block that is recomputed",
    mistake="a recomputation does not know in which module it is: F.dropout in a block's forward is drawn by torch, and drops others than the forward did",
    edits=(
        Edit(
            "parallel/dropout/interceptor.py",
            "RandomOpInterceptor._replay_context",
            "        return partial(self._marking_running_module, self._calling[-1], self._mode.depth > 0)\n",
            "        name = self._calling[-1]\n        if __planted__(name is not None):\n            name = None\n        return partial(self._marking_running_module, name, self._mode.depth > 0)\n",
        ),
    ),
    shows=("zero3-full", "ddp-selective"),
    clean=("ddp", "zero3"),
    tensors=("blocks.*", "embed.weight"),
    job=("--model", "exam_models:WithFunctionalDropout", "data.seq_len=16"),
    cause=("what is recomputed there",),
)
