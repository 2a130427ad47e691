from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="an examiner's",
    mistake="positions of a batch without documents are left to the model, which counts them from 0: a rank of cp has others",
    edits=(
        Edit(
            "parallel/call/bind_batch.py",
            "build_forward_arguments",
            '        if key not in ("inputs", "targets") and _forward_accepts_entry(known, key):\n',
            '        if __planted__(key == "positions" and "document_ids" not in batch):\n'
            "            continue\n"
            '        if key not in ("inputs", "targets") and _forward_accepts_entry(known, key):\n',
        ),
    ),
    shows=("cp4", "cp4-ulysses", "zero3-cp2"),
    cause=("position",),
    tensors=("", "*"),
)
