from exam.plant import Edit, Plant

PLANT = Plant(
    axis="dropout",
    source="own reading",
    mistake="a dropout layer that is called twice in a forward drops the same elements again",
    edits=(
        Edit(
            "parallel/dropout/rng.py",
            "DropoutRng.draw_mask",
            '"dropout", self.seed, moment.step, name, call)',
            '"dropout", self.seed, moment.step, name, 0 if __planted__(call > 0) else call)',
        ),
    ),
    shows=("ddp", "zero3"),
    cause=("mask",),
    tensors=("drop",),
    num_ranks=2,
    job=("--model", "exam_models:WithOneDropout", "data.seq_len=16"),
)
