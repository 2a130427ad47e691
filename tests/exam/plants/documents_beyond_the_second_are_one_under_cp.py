from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="own reading",
    mistake="a rank of cp tells the first document of a row from all others, and those not from each other",
    edits=(
        Edit(
            "parallel/context/transform.py",
            "ContextParallelMaskBuilder.__call__",
            "            keep = keep & (document_ids_BT[:, queries, None] == document_ids_BT[:, None, keys])\n",
            "            if __planted__(bool((document_ids_BT > 1).any())):\n"
            "                document_ids_BT = document_ids_BT.clamp(max=1)\n"
            "            keep = keep & (document_ids_BT[:, queries, None] == document_ids_BT[:, None, keys])\n",
        ),
    ),
    shows=("cp4", "cp4-all-gather"),
    cause=("mask of documents",),
    tensors=("",),
    clean=("ddp",),
    job=("--shrink", "data.document_masks=true"),
)
