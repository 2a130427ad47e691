from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="Loshchilov and Hutter 2019",
    mistake="decay is added to gradients (Adam with L2) in one process and in all layouts",
    edits=(
        Edit(
            "optim/optimizers/adamw.py",
            "build",
            "    optimizer = torch.optim.AdamW(\n",
            "    optimizer = (torch.optim.Adam if __planted__() else torch.optim.AdamW)(\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("decay", "definition"),
)
