from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading",
    mistake="from step 4 on masks are those of step 3",
    edits=(
        Edit(
            "parallel/dropout/rng.py",
            "DropoutRng.draw_mask",
            '            hash_to_stable_64_bits("dropout", self.seed, moment.step, name, call),\n',
            "            hash_to_stable_64_bits(\n"
            '                "dropout", self.seed, 3 if __planted__(moment.step > 3) else moment.step, name, call\n'
            "            ),\n",
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("masks",),
    tensors=("blocks.0.drop", "*"),
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
