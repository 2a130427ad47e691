from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="torchtitan ecae62f (#4054)",
    mistake="the gradient of what enters a mixture is a rank's part, taken for the whole",
    edits=(
        Edit(
            "parallel/tensor/modules.py",
            "enter_region_before_forward",
            "            return (*args[:index], group.enter(value), *args[index + 1 :]), kwargs\n",
            '            is_mixture_of_experts = type(part).__name__ == "MixtureOfExperts" and not group.cuts_sequence\n'
            "            entered = value if __planted__(is_mixture_of_experts) else group.enter(value)\n"
            "            return (*args[:index], entered, *args[index + 1 :]), kwargs\n",
        ),
    ),
    shows=("tp4-whole-sequence", "zero3-tp2-whole-sequence-ep2"),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("blocks.1.ffn_norm.weight",),
    clean=("tp4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
