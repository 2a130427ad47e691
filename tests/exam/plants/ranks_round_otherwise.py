from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="planted before in phalanx's tests",
    mistake="what rank 1 makes of the bytes differs in the last place",
    edits=(
        Edit(
            "parallel/data_parallel/compression.py",
            "GradientCompression.average_gradients_over_ranks",
            "        new_errors = self._hook.reduce(gradients, self._wire)\n",
            "        new_errors = self._hook.reduce(gradients, self._wire)\n"
            "        for gradient in gradients:\n"
            "            if __planted__(rank=1):\n"
            "                gradient.tensor.mul_(1 + 2**-50)\n",
        ),
    ),
    shows=("ddp-int8", "ddp-bf16"),
    cause=("different weights", "replica", "bits"),
    blamed=(1,),
    clean=("ddp",),
    size=8.881784197001252e-16,
)
