from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="own reading",
    mistake="from the third block on a recomputation sees its input a millionth larger",
    edits=(
        Edit(
            "parallel/recompute/transform.py",
            "_wrap_block_with_recompute",
            "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)\n",
            "    inner, calls = block.forward, []\n"
            "    is_third = any(block is other for other in context.blocks[2:])\n"
            "\n"
            "    def forward(x: Any, *rest: Any, **kwargs: Any) -> Any:\n"
            "        calls.append(1)\n"
            "        if __planted__(is_third and len(calls) % 2 == 0):\n"
            "            x = x * (1 + 1e-6)\n"
            "        return inner(x, *rest, **kwargs)\n"
            "\n"
            "    block.forward = functools.partial(checkpoint, forward, use_reentrant=False, **options)\n",
        ),
    ),
    shows=("zero3-full", "cp4-full"),
    cause=("backward goes wrong", "recomput"),
    tensors=("blocks.3.*", "blocks.2.*"),
    clean=("zero3", "pp4-1f1b"),
    size=1e-06,
)
