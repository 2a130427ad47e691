from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="own reading",
    mistake="of ZeRO-1's gradients a rank gets the sum of its rows over all ranks, and not the mean",
    edits=(
        Edit(
            "parallel/data_parallel/own_rows.py",
            "OwnRowsReduction._post_own_rows",
            '            work = transport.reduce_rows_in_place(self._group, bucket, own_rows, "avg")\n',
            '            operation = "sum" if __planted__() else "avg"\n'
            "            work = transport.reduce_rows_in_place(self._group, bucket, own_rows, operation)\n",
        ),
    ),
    shows=("zero1",),
    cause=("summed over the data-parallel ranks", "4 x"),
    clean=("ddp", "zero3"),
)
