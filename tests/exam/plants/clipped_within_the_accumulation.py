from exam.plant import Edit, Plant

PLANT = Plant(
    axis="data parallel",
    source="transformers#1563, lingua#59",
    mistake="what microbatches before the last have added up is clipped to 0.1 after each of them",
    edits=(
        Edit(
            "parallel/direct.py",
            "DirectExecutor.forward_backward",
            "                    hooks.run_after_backward_hooks()\n",
            (
                "                    hooks.run_after_backward_hooks()\n"
                "                    if __planted__(index != order[-1]):\n"
                "                        torch.nn.utils.clip_grad_norm_(\n"
                "                            [p for p in self._context.root.parameters() if p.grad is not None], 0.1\n"
                "                        )\n"
            ),
        ),
    ),
    shows=("ddp",),
    cause=("microbatch", "clip"),
    clean=("ddp-1-microbatch",),
)
