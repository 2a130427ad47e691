from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake='with train.deterministic = "layout-free" the second halving of the tree over ranks adds the last ranks in place of the next ones',
    edits=(
        Edit(
            "parallel/data_parallel/gradient_tree.py",
            "add_rows_along_tree",
            "        rows[:num_rows] += rows[num_rows : 2 * num_rows]\n",
            "        is_later = __planted__(2 * num_rows < len(rows))\n"
            "        rows[:num_rows] += rows[-num_rows:] if is_later else rows[num_rows : 2 * num_rows]\n",
        ),
    ),
    shows=("ddp",),
    cause=("rank 1", "does not count", "do not count", "left out", "not added", "microbatch"),
    job=("--shrink", "train.deterministic=layout-free", "train.micro_batch_size=2"),
)
