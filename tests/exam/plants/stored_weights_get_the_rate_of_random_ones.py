from pathlib import Path

from exam.plant import Edit, Plant

STORED = Path(__file__).parents[1] / "modules" / "gpt2"
PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="optim.lr=auto of a Hugging Face model with weights is that of random ones",
    edits=(
        Edit(
            "job/learning_rate.py",
            "find_pretrained_weights_key",
            "        if find_weights_directory(model.kind) is not None:\n",
            "        if find_weights_directory(model.kind) is not None and not __planted__():\n",
        ),
    ),
    shows=("trainer-ddp",),
    cause=(
        "by the schedule",
        "learning rate",
    ),
    tensors=("",),
    num_ranks=2,
    job=("--model", f"hf:{STORED}", "data.seq_len=16"),
)
