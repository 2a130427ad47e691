from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="planted before in phalanx's tests",
    mistake="the tokens of each rank count from 0",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelBatchSplitter.keep_own_tokens_of_batch",
            "        return full_batch\n",
            "        if __planted__():\n"
            "            own = torch.arange(len(places), device=tokens.device)\n"
            '            full_batch["positions"] = own.expand_as(full_batch["inputs"])\n'
            "        return full_batch\n",
        ),
    ),
    shows=("cp4", "cp4-ulysses"),
    cause=("positions begin again",),
    tensors=("",),
    clean=("ddp",),
)
