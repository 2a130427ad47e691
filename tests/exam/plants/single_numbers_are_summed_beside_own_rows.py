from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="where ZeRO-1 gives each rank its rows, gradients that nobody cuts are added up and not divided",
    edits=(
        Edit(
            "parallel/data_parallel/own_rows.py",
            "OwnRowsReduction._post_whole",
            "        flat.div_(self._num_ranks)\n",
            "        flat.div_(1 if __planted__() else self._num_ranks)\n",
        ),
    ),
    shows=("zero1",),
    cause=("4 x", "summed"),
    tensors=("gain",),
    clean=("ddp", "zero3"),
    job=("--model", "exam_models:WithGain", "data.seq_len=16"),
)
