from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="Megatron-LM#3159, #2417",
    mistake="the divisor has one target more than there are",
    edits=(
        Edit(
            "parallel/step_reducer.py",
            "StepReducer.reduce_and_clip",
            "normalizer.gradient_multiplier(num_targets, num_ranks)",
            "normalizer.gradient_multiplier(num_targets + (1 if __planted__() else 0), num_ranks)",
        ),
    ),
    shows=("ddp", "zero3", "tp4", "pp4-1f1b"),
    cause=("target", "token"),
    size=0.001,
)
