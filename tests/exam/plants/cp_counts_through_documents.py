from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="Megatron-LM#5243",
    mistake="under cp positions of packed documents go on from one to the next",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelBatchSplitter.keep_own_tokens_of_batch",
            ("            **batch,\n        }\n"),
            (
                "            **batch,\n"
                "        }\n"
                '        if __planted__("document_ids" in batch):\n'
                '            full_batch["positions"] = torch.arange(length, device=tokens.device).expand_as(tokens)\n'
            ),
        ),
    ),
    shows=("cp4", "zero3-cp2"),
    cause=("position",),
    clean=("ddp",),
    job=("--model", "gpt2", "--shrink", "data.document_masks=true"),
)
