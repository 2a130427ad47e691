from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "llama" / "config.json"
PLANT = Plant(
    axis="model",
    source="an examiner's",
    mistake="a Hugging Face model is built without the number of key heads that its config.json says",
    edits=(
        Edit(
            "job/hugging_face.py",
            "read_model_config",
            "    return values\n",
            '    return {key: value for key, value in values.items() if not __planted__(key == "num_key_value_heads")}\n',
        ),
    ),
    shows=("ddp",),
    cause=("another one as phalanx builds",),
    tensors=(
        "*k_proj*",
        "*v_proj*",
    ),
    num_ranks=2,
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16"),
)
