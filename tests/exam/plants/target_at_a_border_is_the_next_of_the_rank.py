from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading: labels that are shifted after the sequence was cut (transformers, Megatron-LM)",
    mistake="under zigzag the last token of a rank's first chunk predicts the first token of its second one",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelBatchSplitter.keep_own_tokens_of_batch",
            "            full_batch[key] = full_batch[key].index_select(1, places)\n",
            "            full_batch[key] = full_batch[key].index_select(1, places)\n"
            "        border = len(places) // self.group.chunks.chunks_per_rank\n"
            '        if __planted__(border < len(places) and "targets" in full_batch):\n'
            '            last = full_batch["targets"][:, border - 1]\n'
            '            following = full_batch["inputs"][:, border].to(last.dtype)\n'
            "            last.copy_(torch.where(last >= 0, following, last))\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("target", "label", "shifted"),
    tensors=("",),
    clean=("ddp", "cp4-one-run"),
)
