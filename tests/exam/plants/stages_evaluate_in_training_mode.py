from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="mt-dnn#45",
    mistake="an evaluation in a pipeline leaves the blocks of its stages in training mode",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.train",
            "        self._context.outer.train(mode)\n",
            (
                "        self._context.outer.train(mode)\n"
                "        if __planted__(self.is_staged and not mode):\n"
                "            for block in self._context.blocks:\n"
                "                block.train()\n"
            ),
        ),
    ),
    shows=("pp2-1f1b", "trainer-pp2-1f1b"),
    cause=("evaluation",),
    tensors=("",),
    clean=("ddp",),
    num_ranks=2,
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
