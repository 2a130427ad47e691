from pathlib import Path

from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="transformers' packed_colwise (own reading)",
    mistake="of transformers' experts gate and up, which are one matrix, are cut as if they were one: a rank gets gates and another one ups",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "ModuleSharder._shard_experts",
            "            self._find_dim_slices_of_rank(rule, getattr(part, first).shape[1], name),\n",
            "            self._find_dim_slices_of_rank(\n                replace(rule, parts=rule.parts[: 1 if __planted__(len(rule.parts) > 1) else None]),\n                getattr(part, first).shape[1],\n                name,\n            ),\n",
        ),
    ),
    shows=("tp2",),
    clean=("zero3",),
    num_ranks=2,
    job=(
        "--model",
        f"hf:{Path(__file__).parents[1] / 'modules' / 'mixtral' / 'config.json'}",
        "data.seq_len=16",
    ),
    cause=("cuts elsewhere",),
)
