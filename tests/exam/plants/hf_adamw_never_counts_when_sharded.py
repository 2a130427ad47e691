from pathlib import Path

from exam.plant import Edit, Plant

CONFIG = Path(__file__).parents[1] / "modules" / "llama" / "config.json"
PLANT = Plant(
    axis="optimizer",
    source="OLMo-core CHANGELOG (SkipStepAdamW)",
    mistake="where weights of a Hugging Face model are sharded the optimizer's count of steps stays at 0",
    edits=(
        Edit(
            "optim/optimizers/adamw.py",
            "build",
            "    return optimizer\n",
            '    if __planted__(any(hasattr(p, "to_local") for p in groups.parameters())):\n'
            "        optimizer.register_step_pre_hook(\n"
            "            lambda opt, *_: [slots['step'].zero_() for slots in opt.state.values()] and None\n"
            "        )\n"
            "    return optimizer\n",
        ),
    ),
    shows=("zero1", "zero3"),
    cause=("were 1 in place of 2",),
    clean=("ddp", "tp2"),
    num_ranks=2,
    job=("--model", f"hf:{CONFIG}", "data.seq_len=16"),
)
