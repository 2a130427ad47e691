from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="planted before in phalanx's tests",
    mistake="tokens see all before them, whatever their document",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelMaskBuilder.__call__",
            "        total, size = num_tokens * self.group.size, self.group.size\n",
            "        total, size = num_tokens * self.group.size, self.group.size\n"
            "        document_ids_BT = None if __planted__() else document_ids_BT\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("mask of documents",),
    tensors=("",),
    clean=("ddp",),
    job=("--shrink", "data.document_masks=true"),
)
