from exam.plant import Edit, Plant

PLANT = Plant(
    axis="recompute and offload",
    source="own reading: recomputation in a pipeline, several microbatches in flight",
    mistake="in a pipeline a recomputed block drops what the newest microbatch of the rank drops",
    edits=(
        Edit(
            "parallel/dropout/rng.py",
            "DropoutRng.drawing_in_microbatch",
            "        before, self._moment = self._moment, MicrobatchDrawCounter(step, first_row, num_rows)\n",
            "        before, self._moment = self._moment, MicrobatchDrawCounter(step, first_row, num_rows)\n"
            "        if not __planted__(False):\n"
            "            self._newest_row = first_row\n",
        ),
        Edit(
            "parallel/dropout/rng.py",
            "_ReplayDrawStateContext.__enter__",
            "        at_start = self._recorded.at_start\n",
            "        at_start = self._recorded.at_start\n"
            '        newest = getattr(self._dropout_rng, "_newest_row", None)\n'
            "        if __planted__(at_start is not None and at_start.first_row != newest):\n"
            "            at_start = replace(at_start, first_row=newest)\n",
        ),
    ),
    shows=("pp2-zero3-selective-1f1b",),
    cause=("recomput", "mask", "dropout"),
    tensors=("blocks.[01].*", "embed.weight"),
    blamed=(0, 1),
    clean=("zero3-full", "zero3-selective", "pp2-zero3-1f1b"),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
