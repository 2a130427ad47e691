from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="Megatron-LM#6839, torchtitan#1373",
    mistake="the latent of keys, which all heads share, gets the gradient of a rank's own heads",
    edits=(
        Edit(
            "parallel/tensor/sharder.py",
            "ModuleSharder._has_partial_gradient",
            '            return rule.kind == "partial" or self.group.cuts_sequence\n',
            '            is_partial = rule.kind == "partial" and not __planted__("kv_down" in owner)\n'
            "            return is_partial or self.group.cuts_sequence\n",
        ),
    ),
    shows=("tp4-whole-sequence",),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("*kv_down.weight",),
    clean=("tp4",),
    job=("--model", "small-latent", "--shrink"),
)
