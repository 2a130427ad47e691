from exam.plant import Edit, Plant

PLANT = Plant(
    axis="checkpoint",
    source="own reading",
    mistake="buffers without dimensions are in no checkpoint",
    edits=(
        Edit(
            "mesh/logical.py",
            "collect_module_shards",
            "for item in module.named_buffers() if item[0] in persistent]",
            "for item in module.named_buffers() if item[0] in persistent"
            " and not __planted__(item[1].ndim == 0)]",
        ),
    ),
    shows=("ddp", "trainer-ddp"),
    cause=("no rank has it among its state",),
    tensors=("norm.num_batches_tracked",),
    job=("--model", "exam_models:WithAveragingBatchNorm", "data.seq_len=16"),
    num_ranks=2,
)
