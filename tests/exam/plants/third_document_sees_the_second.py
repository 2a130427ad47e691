from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="attention with one mask tells the first document of a row from all others, and those not from each other",
    edits=(
        Edit(
            "nn/attention.py",
            "make_attention_mask",
            "        keep = keep & (document_ids_BT[:, :, None] == document_ids_BT[:, None, :])\n",
            "        if __planted__(bool((document_ids_BT > 1).any())):\n"
            "            document_ids_BT = document_ids_BT.clamp(max=1)\n"
            "        keep = keep & (document_ids_BT[:, :, None] == document_ids_BT[:, None, :])\n",
        ),
    ),
    shows=("plain",),
    cause=("plain implementation",),
    job=("--shrink", "data.document_masks=true"),
)
