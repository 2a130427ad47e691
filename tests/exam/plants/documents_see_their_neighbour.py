from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="the last document of a row sees the one before it",
    edits=(
        Edit(
            "nn/attention.py",
            "make_attention_mask",
            "        keep = keep & (document_ids_BT[:, :, None] == document_ids_BT[:, None, :])\n",
            "        ids = document_ids_BT\n"
            "        if __planted__():\n"
            "            last = ids.amax(1, keepdim=True)\n"
            "            ids = ids - (ids == last).to(ids.dtype)\n"
            "        keep = keep & (ids[:, :, None] == ids[:, None, :])\n",
        ),
    ),
    shows=("plain",),
    cause=("reference", "implementation", "phalanx.nn"),
    tensors=("", "*"),
    job=("--shrink", "data.document_masks=true"),
)
