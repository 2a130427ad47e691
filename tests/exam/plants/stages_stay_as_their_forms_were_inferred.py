from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="an examiner's",
    mistake="after it has learned what its stages hand on a pipeline stays in evaluation mode, without dropout",
    edits=(
        Edit(
            "parallel/pipeline/shape_inference.py",
            "infer_stage_input_specs",
            "    modes = [(part, part.training) for part in module.modules()]\n",
            "    if __planted__():\n"
            "        module.eval()\n"
            "    modes = [(part, part.training) for part in module.modules()]\n",
        ),
    ),
    shows=("pp2-1f1b", "trainer-pp2-1f1b"),
    cause=("evaluation mode", "dropout", "in evaluation", "mask"),
    clean=("ddp",),
    num_ranks=2,
    job=("--model", "exam_models:WithDropout", "data.seq_len=16"),
)
