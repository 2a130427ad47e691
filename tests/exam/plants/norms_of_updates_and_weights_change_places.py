from exam.plant import Edit, Plant

PLANT = Plant(
    axis="trainer",
    source="an examiner's",
    mistake="the norms of updates on record are those of weights, and the other way round",
    edits=(
        Edit(
            "train/block_norms.py",
            "BlockNormRecorder.finish_step",
            "        self._emit_pending(norms[:num_blocks], norms[num_blocks:])\n",
            "        parts = norms[:num_blocks], norms[num_blocks:]\n        self._emit_pending(*(reversed(parts) if __planted__(norms) else parts))\n",
        ),
    ),
    shows=("trainer-ddp", "trainer-zero3"),
    cause=("on record the norm",),
    tensors=("",),
    num_ranks=2,
)
