from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "gpt2" / "config.json"
PLANT = Plant(
    axis="checkpoint",
    source="an examiner's",
    mistake="what is written of a matrix in blocks of columns are the first columns, for each block",
    edits=(
        Edit(
            "checkpoint/writing/write.py",
            "view_block_of_local_tensor",
            "    return tensor[tuple(slice(o, o + s) for o, s in zip(box.local_offset, box.size, strict=True))]\n",
            "    offsets = box.local_offset\n"
            "    if __planted__(any(offsets[1:])):\n"
            "        offsets = (offsets[0], *(0 for _ in offsets[1:]))\n"
            "    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, box.size, strict=True))]\n",
        ),
    ),
    shows=("trainer-tp2",),
    cause=("resum", "checkpoint", "restor", "written or read in other places"),
    tensors=("*c_attn*",),
    clean=("trainer-ddp",),
    num_ranks=2,
    job=(
        "--model",
        f"hf:{CONFIG}",
        "data.seq_len=16",
        "model.args={embd_pdrop = 0.0, resid_pdrop = 0.0}",
    ),
)
