from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "qwen3" / "config.json"
PLANT = Plant(
    axis="tensor parallel",
    source="an examiner's",
    mistake="norms of heads of a Hugging Face model are said to be the same on each rank of tp: their gradients are those of a rank's heads",
    edits=(
        Edit(
            "nn/hugging_face/shard_rules.py",
            "_build_rule_of_layer",
            '        return _LayerRule("partial")\n',
            '        return _LayerRule("replicate" if __planted__() else "partial")\n',
        ),
    ),
    shows=("tp2",),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("*.q_norm.weight", "*.k_norm.weight"),
    clean=("zero3",),
    num_ranks=2,
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16"),
)
