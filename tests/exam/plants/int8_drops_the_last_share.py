from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="pytorch#194457",
    mistake="of uneven shares the last rank's padding is taken from the front",
    edits=(
        Edit(
            "parallel/hooks/int8.py",
            "PaddedElementShares.flatten_blocks",
            "        return shares[: self.num_elements]\n",
            "        missing = len(shares) - self.num_elements\n"
            "        return shares[missing:] if __planted__(missing) else shares[: self.num_elements]\n",
        ),
    ),
    shows=("ddp-int8",),
    cause=("sent", "keep", "order"),
    clean=("ddp-topk",),
    job=("--model", "gpt2", "--shrink"),
)
