from exam.plant import Edit, Plant

PLANT = Plant(
    axis="drift",
    source="TrainCheck pytorch-84803",
    mistake="of whole parameters rank 1 keeps its own sum of gradients, one part in 10^12 off",
    edits=(
        Edit(
            "parallel/data_parallel/unsharded_params.py",
            "average_gradients_in_one_collective",
            "        flat /= dist.get_world_size(group)\n",
            "        flat /= dist.get_world_size(group)\n"
            "        if __planted__(rank=1):\n"
            "            flat *= 1 + 1e-12\n",
        ),
    ),
    shows=("pp2-ddp-1f1b", "zero3-units2-whole"),
    cause=("replica", "bits", "different weights", "apart", "rank 1"),
    blamed=(1,),
    size=1e-12,
)
