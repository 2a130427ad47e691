from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "vit" / "config.json"
PLANT = Plant(
    axis="loss",
    source="Megatron-LM#7452 f.3",
    mistake="labels of images that are masked count in the divisor",
    edits=(
        Edit(
            "nn/objective.py",
            "classification_cross_entropy",
            "    return loss_sum, (labels != IGNORE_INDEX).sum()\n",
            "    ignored = -1 if __planted__() else IGNORE_INDEX\n"
            "    return loss_sum, (labels != ignored).sum()\n",
        ),
    ),
    shows=("ddp", "trainer-ddp"),
    cause=("masked ones count",),
    num_ranks=2,
    job=("--model", f"hf:{CONFIG}"),
)
