from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="own reading: what is dropped stands at the end of the counts",
    mistake="loads of experts on record begin with how many choices were dropped: each expert has the load of the one before",
    edits=(
        Edit(
            "parallel/expert/router_load.py",
            "ReducedRouterLoads.last_step_loads",
            "            *counts, dropped = (int(next(numbers)) for _ in part)\n",
            "            read = [int(next(numbers)) for _ in part]\n            *counts, dropped = [read[-1], *read[:-1]] if __planted__() else read\n",
        ),
    ),
    shows=("ddp", "zero3"),
    tensors=("", "*router*"),
    job=("--model", "small-mixtral", "--shrink", "model.num_experts=4", "model.balance_loss=0.05"),
    cause=("shifted by one",),
)
