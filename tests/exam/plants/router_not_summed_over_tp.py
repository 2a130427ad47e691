from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="torchtitan ecae62f (#4054)",
    mistake="a router keeps what its rank's part of the experts owes it",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "ModuleSharder.list_parameters_with_partial_gradients",
            "                and parameter.requires_grad\n",
            "                and parameter.requires_grad\n"
            '                and not __planted__("router" in full)\n',
        ),
    ),
    shows=("tp4", "zero3-tp2-ep2"),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("*.moe.router.weight",),
    clean=("zero3-ep4",),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
)
