from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "llama" / "config.json"
PLANT = Plant(
    axis="optimizer",
    source="verify's own exam",
    mistake="an embedding of a Hugging Face model that tp has cut decays",
    edits=(
        Edit(
            "optim/groups.py",
            "_is_exempt_from_decay",
            '    return parameter.ndim < 2 or is_exempt_layer or "embed" in name\n',
            '    if __planted__("forward" in vars(holder) and isinstance(holder, EMBEDDING_TYPES)):\n'
            "        return False\n"
            '    return parameter.ndim < 2 or is_exempt_layer or "embed" in name\n',
        ),
    ),
    shows=("tp2",),
    cause=("as if this tensor decayed",),
    tensors=("model.embed_tokens.weight",),
    clean=("zero3",),
    num_ranks=2,
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16"),
)
