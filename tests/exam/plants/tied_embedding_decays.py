from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "gpt2" / "config.json"
PLANT = Plant(
    axis="optimizer",
    source="own reading: groups of weights that two modules hold",
    mistake="a tied embedding decays because the head that shares it would",
    edits=(
        Edit(
            "optim/groups.py",
            "build_weight_decay_groups",
            "    # By name from here on: what is trained may be shards that stand for the module's parameters.\n",
            "    for part in module.modules():\n"
            "        for name, parameter in part.named_parameters(recurse=False):\n"
            "            is_kept = id(parameter) in undecayed_ids\n"
            "            if __planted__(is_kept and not _is_exempt_from_decay(part, name, parameter)):\n"
            "                undecayed_ids.discard(id(parameter))\n"
            "    # By name from here on: what is trained may be shards that stand for the module's parameters.\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("decay",),
    tensors=("transformer.wte.weight", "*wte*"),
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16"),
)
