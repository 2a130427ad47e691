from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="an examiner's",
    mistake="a stage whose own optimizer has groups of one rate alone trains at the job's rate, and not at its part of it",
    edits=(
        Edit(
            "optim/build.py",
            "build_optimizer",
            "        all_ratios.update(*mesh.gather_json(ratios))\n",
            "        of_all_stages = mesh.gather_json(ratios)\n"
            "        if not __planted__(len(all_ratios) == 1 and 1.0 not in all_ratios):\n"
            "            all_ratios.update(*of_all_stages)\n",
        ),
    ),
    shows=("pp4-1f1b",),
    cause=("rate",),
    tensors=("blocks.*",),
    clean=("zero3",),
    job=("--shrink", "optim.kind=exam_models:build_slow_blocks"),
)
