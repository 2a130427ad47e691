from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="the ramp of llama3's stretched positions is reversed",
    edits=(
        Edit(
            "nn/rotary.py",
            "_compute_llama3_kept_share",
            ".clamp(0, 1)",
            ".clamp(0, 1) if not __planted__() else 1 - ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0, 1)",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--model", "llama3.1-8b", "--shrink"),
)
