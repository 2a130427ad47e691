from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "llama" / "config.json"
PLANT = Plant(
    axis="model",
    source="own reading: position ids of packed sequences (transformers)",
    mistake="the adapter of Hugging Face models hands on no positions where they begin again in a row",
    edits=(
        Edit(
            "nn/hugging_face/adapter.py",
            "_make_token_forward",
            '            named["position_ids"] = positions\n',
            "            begins_again = type(positions) is torch.Tensor and bool(\n"
            "                (positions.diff(dim=-1) < 0).any()\n"
            "            )\n"
            '            named["position_ids"] = None if __planted__(begins_again) else positions\n',
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("position", "adapter", "document"),
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16"),
)
