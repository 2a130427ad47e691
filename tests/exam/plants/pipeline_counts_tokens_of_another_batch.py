from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="own reading",
    mistake="a recomputation under tp takes the sequence one token shorter",
    edits=(
        Edit(
            "parallel/pipeline/executor.py",
            "PipelineExecutor._set_num_tokens",
            "            self._tensor_group.num_tokens = self._num_tokens[self._spec_key(batch)]\n",
            "            num_tokens = self._num_tokens[self._spec_key(batch)]\n"
            "            self._tensor_group.num_tokens = num_tokens\n"
            "            if __planted__(num_tokens % self._tensor_group.size):\n"
            "                self._tensor_group.num_tokens = num_tokens - 1\n",
        ),
    ),
    shows=("pp2-tp2-odd-sequence-1f1b",),
    cause=("token", "sequence"),
    clean=("pp2-tp2-1f1b",),
)
