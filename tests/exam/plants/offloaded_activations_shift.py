from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="planted before in phalanx's tests",
    mistake="what comes back from host memory begins an element too late",
    edits=(
        Edit(
            "parallel/offload/activations.py",
            "SavedTensorOffloader._fetch_storage_to_device",
            "            offloaded.back.copy_(offloaded.host, non_blocking=True)\n",
            "            is_large = offloaded.host.numel() > 4096\n"
            "            host = offloaded.host.roll(-8) if __planted__(is_large) else offloaded.host\n"
            "            offloaded.back.copy_(host, non_blocking=True)\n",
        ),
    ),
    shows=("ddp-offload-activations", "zero3-selective"),
    cause=("host memory",),
    clean=("ddp",),
)
