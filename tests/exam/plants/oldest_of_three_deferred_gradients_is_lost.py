from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading: deferred weight gradients that are flushed early",
    mistake="where two other backwards wait for their weight gradients, the first one of the oldest is dropped",
    edits=(
        Edit(
            "parallel/pipeline/weight_grads.py",
            "DeferredWeightGrads.compute_deferred_gradients",
            "        for work in self._due.pop(key):\n            work()\n",
            "        works = self._due.pop(key)\n"
            "        if __planted__(len(self._due) >= 2):\n"
            "            works = works[1:]\n"
            "        for work in works:\n"
            "            work()\n",
        ),
    ),
    shows=("pp2-zero3-zb-v",),
    cause=("deferred", "weight gradient", "defer", "second half", "gradients of weights", "a w "),
    tensors=("*.weight",),
    clean=("pp2-zero3-1f1b", "pp2-zero3-gpipe", "zero3"),
)
