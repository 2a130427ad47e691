from pathlib import Path

from exam.plant import Edit, Plant

STORED = Path(__file__).parents[1] / "modules" / "gpt2"
PLANT = Plant(
    axis="model",
    source="own reading: fused queries, keys and values under tp, filled from a file",
    mistake="where tp holds three parts of a fused matrix, keys and values are filled from the file's queries",
    edits=(
        Edit(
            "nn/hugging_face/stored_weights.py",
            "StoredWeights.fill_parameter_shards",
            "                        stored[box.slices_in_full_tensor]\n",
            "                        stored[\n"
            "                            (\n"
            "                                shard.boxes[0]\n"
            "                                if __planted__(\n"
            "                                    box is not shard.boxes[0] and box.size == shard.boxes[0].size\n"
            "                                )\n"
            "                                else box\n"
            "                            ).slices_in_full_tensor\n"
            "                        ]\n",
        ),
    ),
    shows=("ddp-tp2", "zero3-tp2"),
    cause=("initial", "stored", "begin", "filled", "file"),
    tensors=("*.c_attn.*",),
    clean=("ddp", "zero3"),
    job=(
        "--model",
        f"hf:{STORED}",
        "data.seq_len=16",
        "model.args={embd_pdrop = 0.0, resid_pdrop = 0.0}",
    ),
)
