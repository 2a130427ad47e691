from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="each random number is drawn for two neighbouring weights",
    edits=(
        Edit(
            "nn/init.py",
            "_make_normals_of_runs",
            "        row[:] = draws[skip:].view(np.uint32)[start % 2 :][:run]\n",
            "        halves_of_draws = draws[skip:].view(np.uint32)\n"
            "        if __planted__():\n"
            "            halves_of_draws = draws[skip:].repeat(2).astype(np.uint32)\n"
            "        row[:] = halves_of_draws[start % 2 :][:run]\n",
        ),
    ),
    shows=("definitions",),
    cause=("no function of seed, name and place",),
    tensors=("blocks.0.q.weight",),
    num_ranks=2,
)
