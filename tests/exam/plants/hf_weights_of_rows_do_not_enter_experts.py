from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "mixtral" / "config.json"
PLANT = Plant(
    axis="experts",
    source="an examiner's",
    mistake="under tp rows of a Hugging Face model enter its experts and their weights do not: routers learn from a rank's features alone",
    edits=(
        Edit(
            "parallel/tensor/modules.py",
            "enter_expert_region_before_forward",
            "    entered = tuple(_enter_if_activations(group, value) for value in args)\n",
            "    entered = tuple(\n"
            "        value\n"
            "        if __planted__(index > 0 and _is_activation_tensor(value))\n"
            "        else _enter_if_activations(group, value)\n"
            "        for index, value in enumerate(args)\n"
            "    )\n",
        ),
    ),
    shows=("tp2",),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("*.gate.weight",),
    clean=("zero3",),
    num_ranks=2,
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16"),
)
