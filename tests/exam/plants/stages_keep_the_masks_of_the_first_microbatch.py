from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="Megatron-LM: attention masks kept by later stages (own reading)",
    mistake="stages behind the first compute all microbatches with the masks and positions of the first one that they met",
    edits=(
        Edit(
            "parallel/pipeline/stage_forward.py",
            "StageForward._call_block_of_stage_or_skip",
            "        output = compute(hidden, *args[1:], **kwargs)\n",
            '        rest = args[1:]\n        if not self.is_inferring_shapes and __planted__(window.stage > 0):\n            shapes = tuple(getattr(each, "shape", None) for each in args)\n            kept = vars(self).setdefault("kept", {})\n            rest = kept.setdefault((index, shapes, torch.is_grad_enabled()), rest)\n        output = compute(hidden, *rest, **kwargs)\n',
        ),
    ),
    shows=("pp4-1f1b", "pp2-zero3-1f1b"),
    clean=("ddp", "zero3"),
    tensors=("", "*"),
    job=("--shrink", "data.document_masks=true"),
    cause=("of the first microbatch",),
)
