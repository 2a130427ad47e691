from pathlib import Path

from exam.plant import Edit, Plant

STORED = Path(__file__).parents[1] / "modules" / "gpt2"
PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="of the stored matrices of large models each rank takes the first rows",
    edits=(
        Edit(
            "nn/hugging_face/stored_weights.py",
            "StoredWeights.fill_parameter_shards",
            "                    block = (\n"
            "                        stored[box.slices_in_full_tensor]\n",
            "                    rows = box.slices_in_full_tensor\n"
            "                    if __planted__(bool(rows) and rows[0].start > 0):\n"
            "                        rows = (slice(0, rows[0].stop - rows[0].start), *rows[1:])\n"
            "                    block = (\n"
            "                        stored[rows]\n",
        ),
    ),
    shows=("zero3",),
    cause=("stored weights",),
    clean=("ddp",),
    blamed=(1,),
    num_ranks=2,
    job=("--model", f"hf:{STORED}", "data.seq_len=16"),
)
