from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="planted before in phalanx's tests",
    mistake="what is said to be a block of rows of a square matrix is one of columns",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "_build_boxes_of_slices",
            "    return TensorParallelCut(shape, tuple(_list_boxes_with_local_offsets(shape, dim, spans)))\n",
            "    is_square = len(shape) == 2 and shape[0] == shape[1]\n"
            "    return TensorParallelCut(shape, tuple(_list_boxes_with_local_offsets(shape, 1 - dim if __planted__(is_square) else dim, spans)))\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("another dimension is cut",),
    tensors=("*.q.weight", "*.o.weight"),
    clean=("zero3",),
)
