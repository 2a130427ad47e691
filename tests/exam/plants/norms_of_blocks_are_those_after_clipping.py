from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="norms of gradients by block on record are those of after clipping, beside a norm of all that is of before",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "block_grad_norms=tuple(factor * s**0.5 for s in gradient_squares))\n",
            "block_grad_norms=tuple(\n"
            "                (max_norm / norm if __planted__(max_norm and norm > max_norm) else 1)\n"
            "                * factor\n"
            "                * s**0.5\n"
            "                for s in gradient_squares\n"
            "            ),\n"
            "        )\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-tp2"),
    cause=("on record the norm",),
    tensors=("",),
    num_ranks=2,
)
