from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="own reading",
    mistake="an image without a label has the loss of class 0, and is not counted",
    edits=(
        Edit(
            "nn/objective.py",
            "classification_cross_entropy",
            "    loss_sum = F.cross_entropy(logits, labels, ",
            "    taken = labels.clamp(min=0) if __planted__(bool((labels < 0).any())) else labels\n"
            "    loss_sum = F.cross_entropy(logits, taken, ",
        ),
    ),
    shows=("ddp", "trainer-ddp"),
    cause=("loss", "objective", "forward"),
    num_ranks=2,
    job=("--model", "small-vit", "--shrink"),
)
