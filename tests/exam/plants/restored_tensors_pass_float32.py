from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="what a checkpoint brings back is rounded to float32 on its way",
    edits=(
        Edit(
            "checkpoint/reading/load.py",
            "load_checkpoint_into_shards",
            "                target.copy_(source)\n",
            "                is_wide = source.dtype == torch.float64\n"
            "                target.copy_(source.float() if __planted__(is_wide) else source)\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("not restored", "resum"),
    size=6e-8,
)
