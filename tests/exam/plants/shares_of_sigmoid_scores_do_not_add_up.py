from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="an examiner's",
    mistake="the balance loss takes scores of a sigmoid for shares, which they are not before they are divided by their sum",
    edits=(
        Edit(
            "nn/routing.py",
            "Router._add_balance_loss_gradient",
            '        if self.scores != "softmax":\n',
            '        if self.scores != "softmax" and not __planted__():\n',
        ),
    ),
    shows=("plain",),
    cause=("balance", "reference", "implementation", "phalanx.nn"),
    tensors=("*.router.weight",),
    num_ranks=2,
    job=("--model", "small-deepseek", "--shrink", "model.balance_loss=0.05"),
)
