from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "gpt2" / "config.json"
PLANT = Plant(
    axis="tensor parallel",
    source="own reading",
    mistake="keys and values of a fused matrix that tp has cut are said to lie where its queries do",
    edits=(
        Edit(
            "mesh/logical.py",
            "_intersect_boxes",
            "        local_offset.append(stored.local_offset[dim] + start - stored_start)\n",
            (
                "        begin = stored_start if __planted__(start > stored_start) else start\n"
                "        local_offset.append(stored.local_offset[dim] + begin - stored_start)\n"
            ),
        ),
    ),
    shows=("tp2",),
    cause=("initial weights", "borders", "elsewhere", "other weights"),
    tensors=("*c_attn*",),
    clean=("zero3",),
    num_ranks=2,
    job=(
        "--model",
        f"hf:{CONFIG}",
        "data.seq_len=16",
        "model.args={embd_pdrop = 0.0, resid_pdrop = 0.0}",
    ),
)
