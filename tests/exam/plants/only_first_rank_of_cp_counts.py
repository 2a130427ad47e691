from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="planted before in phalanx's tests",
    mistake="loss and targets are those of the first rank's tokens",
    edits=(
        Edit(
            "mesh/mesh.py",
            "Mesh.is_tp_leader",
            '        return self.coordinates["tp"] == 0\n',
            '        return self.coordinates["tp"] == 0 and not __planted__(self.coordinates["cp"] > 0)\n',
        ),
    ),
    shows=("cp4", "zero3-cp2"),
    cause=("targets", "share"),
    tensors=("",),
    clean=("tp4", "ddp"),
)
