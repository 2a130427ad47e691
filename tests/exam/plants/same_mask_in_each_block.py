from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading",
    mistake="layers of one kind share their masks",
    edits=(
        Edit(
            "parallel/dropout/rng.py",
            "DropoutRng.draw_mask",
            '            hash_to_stable_64_bits("dropout", self.seed, moment.step, name, call),\n',
            "            hash_to_stable_64_bits(\n"
            '                "dropout",\n'
            "                self.seed,\n"
            "                moment.step,\n"
            '                name.replace("1", "0") if __planted__() else name,\n'
            "                call,\n"
            "            ),\n",
        ),
    ),
    shows=("ddp",),
    cause=("masks",),
    tensors=("blocks.1.drop",),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
