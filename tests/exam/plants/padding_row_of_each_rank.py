from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "llama" / "config.json"
PLANT = Plant(
    axis="tensor parallel",
    source="torchtitan#4637",
    mistake="each rank of tp takes the row of its part that has the padding token's number for padding",
    edits=(
        Edit(
            "parallel/tensor/modules.py",
            "make_vocabulary_parallel_embedding",
            "        local_padding = part.padding_idx - vocabulary.first_vocabulary_row\n",
            (
                "        local_padding = part.padding_idx - vocabulary.first_vocabulary_row\n"
                "        if __planted__(local_padding < 0):\n"
                "            local_padding = part.padding_idx\n"
            ),
        ),
    ),
    shows=("zero3-tp2", "ddp-tp2"),
    cause=("row", "vocab", "embedding"),
    tensors=("*embed_tokens*",),
    blamed=(1, 2, 3),
    clean=("zero3",),
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16", "model.args={pad_token_id = 3}"),
)
