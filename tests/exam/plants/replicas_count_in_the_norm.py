from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="ROCm TransformerEngine#715",
    mistake="gradients that all ranks of tp hold count once for each",
    edits=(
        Edit(
            "parallel/gradients.py",
            "collect_gradients_and_sum_squares",
            "        part = torch.stack(norms).double().square().sum() / holders\n",
            "        part = torch.stack(norms).double().square().sum() / (1 if __planted__(holders > 1) else holders)\n",
        ),
    ),
    shows=("tp4", "ddp"),
    cause=("counted", "each count", "replicas"),
    tensors=("",),
    clean=("zero3-one-unit-offload-parameters",),
)
