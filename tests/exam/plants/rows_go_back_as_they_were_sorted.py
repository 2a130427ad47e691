from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="an examiner's",
    mistake="outputs of experts are put in the order in which their rows came by the permutation that sorted these",
    edits=(
        Edit(
            "parallel/expert/transform.py",
            "ExpertDispatchBetweenRanks.__call__",
            "            outputs.index_select(0, back), received, sent, self.group\n",
            "            outputs.index_select(0, order if __planted__() else back),\n"
            "            received,\n"
            "            sent,\n"
            "            self.group,\n",
        ),
    ),
    shows=("zero3-ep2", "ddp-ep2"),
    cause=(
        "come back to other tokens",
        "come back",
        "other tokens",
        "another token",
        "order of rows",
        "permut",
    ),
    tensors=("", "*.moe.router", "*.moe.*"),
    clean=("zero3", "zero3-ep4"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
    ),
)
