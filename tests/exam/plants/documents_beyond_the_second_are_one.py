from exam.plant import Edit, Plant

PLANT = Plant(
    axis="model",
    source="own reading",
    mistake="blocks of queries tell the first document of a row from all others, and those not from each other",
    edits=(
        Edit(
            "mesh/attend_blocks.py",
            "VisibleKeys.build_additive_mask",
            "            is_hidden = ids[:, first:last, None] != ids[:, None, start:end]\n",
            "            if __planted__(bool((ids > 1).any())):\n"
            "                ids = ids.clamp(max=1)\n"
            "            is_hidden = ids[:, first:last, None] != ids[:, None, start:end]\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("mask of documents",),
    tensors=("",),
    job=("--shrink", "data.document_masks=true"),
)
