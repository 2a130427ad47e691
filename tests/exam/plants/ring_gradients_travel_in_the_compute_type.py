from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="gradients of keys are rounded to bf16 at each hop of the ring",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_RingExchange.compute_own_key_value_gradients",
            "            arriving = group.start_ring_exchange(block_grad, GRADIENTS)\n",
            "            if __planted__():\n"
            "                block_grad = block_grad.to(kv.dtype)\n"
            "            arriving = group.start_ring_exchange(block_grad, GRADIENTS)\n",
        ),
    ),
    shows=("definitions",),
    cause=(
        "so many times one part",
        "travel",
    ),
    tensors=(
        "the gradient of*",
        "what ranks of cp send*",
    ),
    num_ranks=2,
)
