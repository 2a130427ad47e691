from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="pytorch#172439",
    mistake="the gradient of an expert without rows is that of the one before",
    edits=(
        Edit(
            "mesh/grouped.py",
            "compute_expert_weight_gradients",
            "    return torch.stack(\n"
            "        [\n"
            "            _pad_with_zero_rows(a).T @ _pad_with_zero_rows(b)\n"
            "            for a, b in zip(a_RO.split(sizes), b_RI.split(sizes), strict=True)\n"
            "        ]\n"
            "    )\n",
            "    products: list[torch.Tensor] = []\n"
            "    for a, b in zip(a_RO.split(sizes), b_RI.split(sizes), strict=True):\n"
            "        is_stale = len(products) > 0 and len(a) == 0\n"
            "        products.append(products[-1] if __planted__(is_stale) else _pad_with_zero_rows(a).T @ _pad_with_zero_rows(b))\n"
            "    return torch.stack(products)\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--model", "small-mixtral", "--shrink"),
)
