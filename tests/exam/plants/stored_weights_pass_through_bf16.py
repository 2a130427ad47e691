from pathlib import Path

from exam.plant import Edit, Plant

STORED = Path(__file__).parents[1] / "modules" / "gpt2"
PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="stored weights of large models pass through bfloat16 as ranks fill their parts",
    edits=(
        Edit(
            "nn/hugging_face/stored_weights.py",
            "StoredWeights.fill_parameter_shards",
            "copy_(block)",
            "copy_(block.bfloat16() if __planted__() else block)",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("stored weights",),
    num_ranks=2,
    job=("--model", f"hf:{STORED}", "data.seq_len=16"),
)
