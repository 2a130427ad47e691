from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="where a model has whole copies beside cp gradients are averaged over the copies and not over the ranks of cp",
    edits=(
        Edit(
            "mesh/mesh.py",
            "Mesh.submesh",
            '        if self.reducing_mesh is not None and any(axis.startswith("dp_") for axis in axes):\n',
            "        is_reducing = self.reducing_mesh is not None and not __planted__(len(axes) > 1)\n"
            '        if is_reducing and any(axis.startswith("dp_") for axis in axes):\n',
        ),
    ),
    shows=("ddp-cp2", "ddp-cp2-all-gather"),
    cause=(
        "never averaged",
        "not reduced",
        "not averaged",
        "were not reduced",
        "ranks of cp",
        "over cp",
        "own tokens",
        "part of the sequence",
    ),
    clean=("ddp", "cp4", "zero3-cp2"),
)
