from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="torchtitan ecae62f (#4054)",
    mistake="the entry of feed-forwards alone has a backward that does not sum",
    edits=(
        Edit(
            "parallel/tensor/modules.py",
            "enter_region_before_forward",
            "            return (*args[:index], group.enter(value), *args[index + 1 :]), kwargs\n",
            '            is_whole = type(part).__name__ == "FeedForward" and not group.cuts_sequence\n'
            "            entered = value if __planted__(is_whole) else group.enter(value)\n"
            "            return (*args[:index], entered, *args[index + 1 :]), kwargs\n",
        ),
    ),
    shows=("tp4-whole-sequence",),
    cause=("added up", "added them up", "not summed", "nobody sum", "lacks a sum", "missing sum"),
    tensors=("blocks.1.ffn_norm.weight",),
    clean=("tp4",),
)
