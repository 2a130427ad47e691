from exam.plant import Edit, Plant

PLANT = Plant(
    axis="loss",
    source="OLMo-core fa66c2f",
    mistake="where tp has cut the head its loss has a z-loss that is off elsewhere",
    edits=(
        Edit(
            "nn/objective.py",
            "_sum_loss_and_write_gradient",
            "    logits_NV /= norm[:, None]\n",
            "    logits_NV /= norm[:, None]\n"
            "    if __planted__(vocabulary is not None):\n"
            "        log_z = norm.log() + peak\n"
            "        loss_sum = loss_sum + torch.where(valid, 1e-4 * log_z.square(), 0.0).sum()\n"
            "        logits_NV *= 1 + 2e-4 * log_z[:, None]\n",
        ),
    ),
    shows=("tp4", "zero3-tp2"),
    cause=("loss", "head", "vocab"),
    tensors=("", "head.weight", "embed.weight"),
    clean=("ddp",),
)
