from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="an examiner's",
    mistake="the mean of a gradient that FSDP leaves whole is laid out as its parameter lies in memory, and not as its elements are numbered",
    edits=(
        Edit(
            "parallel/data_parallel/unsharded_params.py",
            "average_gradients_in_one_collective",
            "            parameter.grad = torch.empty_like(parameter).copy_(mean.view_as(parameter))\n",
            "            parameter.grad = torch.empty_like(parameter).copy_(mean.view_as(parameter))\n"
            "            if __planted__(not parameter.is_contiguous()):\n"
            "                parameter.grad = mean.clone().as_strided(parameter.shape, parameter.stride())\n",
        ),
    ),
    shows=("zero3", "zero2"),
    cause=("elsewhere", "transpos", "other element", "order of", "permut", "place"),
    tensors=("mix",),
    clean=("ddp",),
    job=("--model", "exam_models:WithTransposedWeight", "data.seq_len=16"),
)
