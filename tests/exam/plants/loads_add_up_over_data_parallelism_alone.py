from exam.plant import Edit, Plant

PLANT = Plant(
    axis="experts",
    source="an examiner's",
    mistake="loads of experts are added up over the ranks of data parallelism, where all but the first of tp bring zeros: their biases of routers stay",
    edits=(
        Edit(
            "mesh/mesh.py",
            "Mesh.stage_group",
            "            return dist.group.WORLD\n",
            "            return self.data_parallel_group() if __planted__(self.layout.tp > 1) else dist.group.WORLD\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("moved by other counts", "loads of", "bias of a router", "biases of routers"),
    tensors=("*.moe.router", "*.moe.router.bias"),
    blamed=(1, 2, 3),
    clean=("ddp", "zero3-ep4"),
    job=(
        "--model",
        "small-mixtral",
        "--shrink",
        "model.num_experts=4",
        "model.balance_loss=0.05",
        "model.balance_bias=0.05",
    ),
)
