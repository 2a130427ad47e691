from exam.plant import Edit, Plant

PLANT = Plant(
    axis="drift",
    source="BLOOM-176B",
    mistake="norms of rank 1 of tp drift by one rounding a step",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.update",
            "        optimizer.step()\n",
            "        optimizer.step()\n"
            "        with torch.no_grad():\n"
            "            for name, parameter in self.named_parameters():\n"
            '                if "norm" in name and __planted__(self.mesh.coordinates["tp"] == 1):\n'
            '                    local = getattr(parameter, "_local_tensor", parameter)\n'
            "                    local.copy_(torch.nextafter(local, local + 1))\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("replica", "bits", "different weights", "apart"),
    tensors=("*norm.weight",),
    blamed=(1, 3),
    clean=("zero3",),
    size=1e-16,
)
