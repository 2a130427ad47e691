from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading: one slot where two transforms need one (tp and ep)",
    mistake="of what transforms have done before the reduction only the last one's part is done: with ep partial gradients are not summed over tp",
    edits=(
        Edit(
            "parallel/step_hooks.py",
            "StepHooks.run_before_reduce_hooks",
            "        for hook in self.before_reduce:\n",
            "        for hook in self.before_reduce[-1 if __planted__(len(self.before_reduce) > 1) else 0 :]:\n",
        ),
    ),
    shows=("zero3-tp2-ep2", "tp2-cp2-ep2"),
    clean=("zero3-ep2", "zero3-tp2"),
    tensors=("*norm*", "*router*"),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
    cause=("nobody added them up",),
)
