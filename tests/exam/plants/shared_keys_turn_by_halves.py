from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="the key that all heads of latent attention share is rotated by halves, and queries by neighbouring pairs",
    edits=(
        Edit(
            "nn/latent_attention.py",
            "LatentAttention._project_keys_and_values",
            "        shared = rotate_neighbouring_pairs(shared_BTR[:, None], table).expand(\n",
            "        halves = shared_BTR[:, None].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)\n"
            "        turned = rotate_neighbouring_pairs(halves if __planted__() else shared_BTR[:, None], table)\n"
            "        shared = turned.expand(\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn", "rotary"),
    num_ranks=2,
    job=("--model", "small-latent", "--shrink"),
)
