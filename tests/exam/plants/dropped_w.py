from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="planted before in phalanx's tests",
    mistake="stage 1 never makes the weight gradients of microbatch 2",
    edits=(
        Edit(
            "parallel/pipeline/weight_grads.py",
            "DeferredWeightGrads.compute_deferred_gradients",
            "        for work in self._due.pop(key):\n            work()\n",
            "        works = self._due.pop(key)\n"
            "        for work in [] if __planted__(key == (1, 2)) else works:\n"
            "            work()\n",
        ),
    ),
    shows=("pp2-tp2-zb-v", "pp2-zero3-zb-v"),
    cause=("a w is left out",),
    tensors=("blocks.1.*", "blocks.2.*"),
    clean=("pp4-1f1b",),
)
