from exam.plant import Edit, Plant

PLANT = Plant(
    axis="drift",
    source="TrainCheck (hardware)",
    mistake="on rank 2 each update leaves one element of one matrix a rounding higher",
    edits=(
        Edit(
            "parallel/model.py",
            "ParallelModel.update",
            "        optimizer.step()\n",
            "        optimizer.step()\n"
            "        with torch.no_grad():\n"
            "            for name, parameter in self.named_parameters():\n"
            '                if name.endswith("blocks.0.ffn.up.weight") and __planted__(rank=2):\n'
            "                    row = parameter.data.view(-1)[:1]\n"
            "                    row.copy_(torch.nextafter(row, row + 1))\n",
        ),
    ),
    shows=("ddp",),
    cause=("replica", "bits", "different weights", "apart"),
    tensors=("blocks.0.ffn.up.weight",),
    blamed=(2,),
    size=1e-16,
)
