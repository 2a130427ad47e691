from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="order of q_norm and rotary positions in Qwen3",
    mistake="queries and keys are normalised after their rotation",
    edits=(
        Edit(
            "nn/attention.py",
            "Attention.forward",
            "        if table is not None:\n"
            "            q, k = rotate(q, table), rotate(k, table)\n",
            "        if table is not None:\n"
            "            q, k = rotate(q, table), rotate(k, table)\n"
            "        if __planted__(self.q_norm is not None and table is not None):\n"
            "            plain_q, plain_k = self.q(x_BTD), self.k(x_BTD)\n"
            "            q, k = (\n"
            "                norm(rotate(y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2), table))\n"
            "                for norm, y in ((self.q_norm, plain_q), (self.k_norm, plain_k))\n"
            "            )\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn", "definition"),
    tensors=("", "*"),
    job=("--model", "qwen3-8b", "--shrink"),
)
