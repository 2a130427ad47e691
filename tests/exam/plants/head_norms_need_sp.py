from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="Megatron-LM#7452 f.11",
    mistake="norms of heads are summed over tp under sequence parallelism only",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "ModuleSharder._has_partial_gradient",
            '            return rule.kind == "partial" or self.group.cuts_sequence\n',
            '            is_partial = rule.kind == "partial" and not __planted__(not self.group.cuts_sequence)\n'
            "            return is_partial or self.group.cuts_sequence\n",
        ),
    ),
    shows=("tp4-whole-sequence", "tp2-whole-sequence-cp2"),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("*q_norm.weight", "*k_norm.weight"),
    clean=("tp4",),
    job=("--shrink", "model.qk_norm=true"),
)
