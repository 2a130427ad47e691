from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading: large modules that are built without memory, nn.Embedding's padding_idx",
    mistake="when the building of a module is recorded a write to one row counts as one to all: what was drawn before is not drawn",
    edits=(
        Edit(
            "mesh/recorded_init.py",
            "_OperationRecorderMode.__torch_dispatch__",
            "            overwrites = function in _OVERWRITING_OPERATORS and refs[0].covers\n",
            "            overwrites = function in _OVERWRITING_OPERATORS and (\n                refs[0].covers or __planted__(bool(refs))\n            )\n",
        ),
    ),
    shows=("ddp", "zero3"),
    tensors=("embed.weight",),
    job=("--model", "exam_models:WithPadding", "data.seq_len=16"),
    cause=("build the module without memory",),
)
