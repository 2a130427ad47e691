from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "llama" / "config.json"
PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="a Hugging Face model is given half of each position",
    edits=(
        Edit(
            "nn/hugging_face/adapter.py",
            "_make_token_forward",
            '            named["position_ids"] = positions\n',
            '            named["position_ids"] = positions // 2 if __planted__() else positions\n',
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("adapter",),
    num_ranks=2,
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16"),
)
