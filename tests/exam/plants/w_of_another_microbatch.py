from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="Megatron-LM f9e6b94 (!3645)",
    mistake="a W does the work of the microbatch before, and the last one is never done",
    edits=(
        Edit(
            "parallel/pipeline/weight_grads.py",
            "DeferredWeightGrads.compute_deferred_gradients",
            "        for work in self._due.pop(key):\n            work()\n",
            "        works = self._due.pop(key)\n"
            '        late = vars(self).setdefault("late", {})\n'
            "        done = late.get(key[0], works) if __planted__(key[1] > 0) else works\n"
            "        late[key[0]] = works\n"
            "        for work in done:\n"
            "            work()\n",
        ),
    ),
    shows=("pp2-tp2-zb-v", "pp2-tp2-interleaved-zero-bubble"),
    cause=("a w is left out",),
    tensors=(
        "*.q.weight",
        "*.k.weight",
        "*.v.weight",
        "*.o.weight",
        "*.up.weight",
        "*.gate.weight",
        "*.down.weight",
    ),
    clean=("pp4-1f1b",),
)
