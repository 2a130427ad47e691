from exam.plant import Edit, Plant

PLANT = Plant(
    axis="optimizer",
    source="an examiner's",
    mistake="where an optimizer updates a part of a parameter the parameter keeps its gradient, and the next step adds to it",
    edits=(
        Edit(
            "parallel/optimizer_params.py",
            "OptimizerParameterSubstitute.move_gradients_to_optimizer",
            "        gradient, self.parameter.grad = self.parameter.grad, None\n",
            "        gradient = self.parameter.grad\n"
            "        if not __planted__():\n"
            "            self.parameter.grad = None\n",
        ),
    ),
    shows=("zero1", "hsdp2x2-zero1", "zero1-offload-optimizer"),
    cause=(
        "left in gradients",
        "cleared",
        "step before",
        "last step",
        "earlier step",
        "accumulat",
        "added to",
    ),
    clean=("ddp", "zero3"),
)
