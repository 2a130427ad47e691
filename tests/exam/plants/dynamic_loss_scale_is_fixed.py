from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="a dynamic loss scale keeps its first value",
    edits=(
        Edit(
            "plan/planner.py",
            "choose_loss_scaling",
            "precision.loss_scale_growth_steps)\n",
            "0 if __planted__() else precision.loss_scale_growth_steps)\n",
        ),
    ),
    shows=("definitions",),
    cause=("the loss is scaled by",),
    tensors=("",),
    num_ranks=2,
)
