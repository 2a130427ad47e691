from pathlib import Path

from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="own reading: c_attn of GPT-2 under tp",
    mistake="queries, keys and values of GPT-2, one matrix, are cut as heads of one kind: a rank has no values",
    edits=(
        Edit(
            "nn/hugging_face/shard_rules.py",
            "_build_gpt2_rules",
            '        "transformer.h.*.attn.c_attn": f"column heads={heads}+{heads}+{heads}",\n',
            '        "transformer.h.*.attn.c_attn": (\n            f"column heads={3 * heads}" if __planted__() else f"column heads={heads}+{heads}+{heads}"\n        ),\n',
        ),
    ),
    shows=("tp2",),
    clean=("zero3",),
    tensors=("", "*"),
    num_ranks=2,
    job=(
        "--model",
        f"hf:{Path(__file__).parents[1] / 'modules' / 'gpt2' / 'config.json'}",
        "data.seq_len=16",
        "model.args={embd_pdrop = 0.0, resid_pdrop = 0.0}",
    ),
    cause=("cuts elsewhere",),
)
