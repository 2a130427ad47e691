from pathlib import Path

from exam.plant import Edit, Plant

STORED = Path(__file__).parents[1] / "modules" / "gpt2"
PLANT = Plant(
    axis="model",
    source="transformers, from_pretrained",
    mistake="a Hugging Face model with stored weights trains in evaluation mode, without dropout",
    edits=(
        Edit(
            "nn/hugging_face/adapter.py",
            "build",
            "            module.train()\n",
            "            module.train(not __planted__())\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("evaluation mode",),
    num_ranks=2,
    job=("--model", f"hf:{STORED}", "data.seq_len=16"),
)
