from exam.plant import Edit, Plant

PLANT = Plant(
    axis="context parallel",
    source="OLMo-core, ring-flash-attention (own reading): skipped blocks together with packed documents",
    mistake="under cp a block of keys that the first sequence of a microbatch does not see is skipped for all of its sequences",
    edits=(
        Edit(
            "parallel/context/attention.py",
            "_hides_all_keys",
            "    return is_on_cpu(mask) and not bool((mask == 0).any())\n",
            "    if is_on_cpu(mask) and __planted__(\n        bool((mask == 0).any()) and not bool((mask[:1] == 0).any())\n    ):\n        return True\n    return is_on_cpu(mask) and not bool((mask == 0).any())\n",
        ),
    ),
    shows=("cp4", "ddp-cp2"),
    clean=("ddp", "cp4-ulysses"),
    tensors=("", "*"),
    job=("--shrink", "data.document_masks=true"),
    cause=("the first sequence",),
)
