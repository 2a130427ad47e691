from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="own reading: Tensor.to without copy=True",
    mistake="weights that are held to measure their update are no copy in float64: the difference is written over them",
    edits=(
        Edit(
            "parallel/block_norms.py",
            "BlockSquares.hold_weights",
            "            self._before[name] = weight.to(choose_norm_dtype([weight]), copy=True)\n",
            "            is_no_copy = __planted__(weight.dtype is torch.float64)\n            self._before[name] = weight.to(choose_norm_dtype([weight]), copy=not is_no_copy)\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    clean=("ddp",),
    num_ranks=2,
    cause=("written over besides the optimizer",),
)
