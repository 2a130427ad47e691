from pathlib import Path

from exam.plant import Edit, Plant

STORED = Path(__file__).parents[1] / "modules" / "gpt2"
PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="the adapter sets the dropout of a Hugging Face model to 0",
    edits=(
        Edit(
            "nn/hugging_face/adapter.py",
            "_adapt_module_to_phalanx",
            "    pattern = _find_block_name_pattern(module)\n",
            "    pattern = _find_block_name_pattern(module)\n"
            "    for part in module.modules():\n"
            "        if __planted__(isinstance(part, nn.Dropout)):\n"
            "            part.p = 0.0\n",
        ),
    ),
    shows=("ddp",),
    cause=("another one as phalanx builds",),
    tensors=("*drop*.p",),
    num_ranks=2,
    job=("--model", f"hf:{STORED}", "data.seq_len=16"),
)
