"""Variants of a few bugs, drawn by a seed: which seam, which axis, which tensor and ranks, how
large an error, from which step.

Each is a factor of 1 + error at one of three seams that only a layout goes through: a gradient
after its reduction, a weight after its update, an activation on its way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from exam.plant import Edit, Plant

SIZES = (2.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
SEAMS = ("gradient", "weight", "activation")
FROM_STEPS = (1, 1, 1, 2, 4)
TENSORS = (
    "embed.weight",
    "blocks.0.attention_norm.weight",
    "blocks.0.attention.q.weight",
    "blocks.0.attention.v.weight",
    "blocks.0.ffn.up.weight",
    "blocks.1.attention.o.weight",
    "blocks.1.ffn_norm.weight",
    "blocks.1.ffn.down.weight",
    "norm.weight",
)
# layout -> the axis of this part of the system, and the coordinate by which a rank is chosen
LAYOUTS = {
    "ddp": ("data parallel", "dp_replicate"),
    "zero1": ("data parallel", "dp_shard"),
    "zero3": ("data parallel", "dp_shard"),
    "tp4": ("tensor parallel", "tp"),
    "tp4-whole-sequence": ("tensor parallel", "tp"),
    "cp4": ("context parallel", "cp"),
    "pp4-1f1b": ("pipeline", "pp"),
}
MODEL, REDUCER = "parallel/model.py", "parallel/step_reducer.py"
# Where activations pass, by axis: (file, symbol, text, text with the factor)
ACTIVATIONS = {
    "data parallel": (
        "parallel/loss_forward.py",
        "MicrobatchLossForward._compute_loss_or_stage_output",
        "        return objective(outputs, on_device)\n",
        "        if __planted__(rank={rank}):\n"
        "            outputs = outputs._replace(hidden_BTD=outputs.hidden_BTD * {factor})\n"
        "        return objective(outputs, on_device)\n",
    ),
    "tensor parallel": (
        "mesh/tensor_group.py",
        "TensorParallelGroup.leave",
        "        output: torch.Tensor = leave.apply(x, self)\n",
        "        if __planted__(self.rank == {rank}):\n"
        "            x = x * {factor}\n"
        "        output: torch.Tensor = leave.apply(x, self)\n",
    ),
    "context parallel": (
        "parallel/context/transform.py",
        "ContextParallelAttentionCore.forward",
        "        return self._attend(q_BHTE, k_BKTE, v_BKTE, mask, self.window, self._masks.group)\n",
        "        if __planted__(self._masks.group.rank == {rank}):\n"
        "            v_BKTE = v_BKTE * {factor}\n"
        "        return self._attend(q_BHTE, k_BKTE, v_BKTE, mask, self.window, self._masks.group)\n",
    ),
    "pipeline": (
        "parallel/pipeline/executor.py",
        "PipelineExecutor._run_forward_action",
        "        return outcome.detach()\n",
        "        is_planted = __planted__(step >= {step} and action.stage == {rank})\n"
        "        return outcome.detach() * ({factor} if is_planted else 1.0)\n",
    ),
}


def generate_variants(seed: int = 0, *, repeats: int = 1) -> Iterator[Plant]:
    """`repeats` variants for each seam and size; the rest is drawn."""
    generator = random.Random(seed)
    for repeat in range(repeats):
        for seam in SEAMS:
            for size in SIZES:
                yield _draw(generator, seam, size, f"{seam}_{size:.0e}_{seed}_{repeat}")


def find_first_step(plant: Plant) -> int:
    """The step in which a variant begins to act, as its mistake says."""
    return int(plant.mistake.rpartition("from step ")[2].removesuffix(" on"))


def _draw(generator: random.Random, seam: str, size: float, name: str) -> Plant:
    layout = generator.choice(list(LAYOUTS))
    step, tensor = generator.choice(FROM_STEPS), generator.choice(TENSORS)
    axis, coordinate = LAYOUTS[layout]
    # Of a pipeline the ranks that hold the tensor are those that have it.
    rank = generator.randrange(3 if axis == "pipeline" else 4)
    any_rank = axis == "pipeline" and seam != "activation"
    edit = _edit(seam, axis, coordinate, rank, step, tensor, size, any_rank=any_rank)
    if seam == "activation" and axis != "pipeline":
        step = 1  # these seams do not know the step
    where = f"on rank {rank} of {coordinate}" if not any_rank else "where it is"
    subject = f"an {seam}" if seam == "activation" else f"the {seam} of {tensor}"
    return Plant(
        axis=axis,
        source="generated",
        mistake=f"{subject} is 1 + {size:.0e} x what it should be, {where}, from step {step} on",
        edits=(edit,),
        shows=(layout,),
        tensors=("*",) if seam == "activation" else (tensor,),
        blamed=() if any_rank or seam == "activation" else (rank,),
        cause=(f"rank {rank}", "stale", "replica", f"{1 + size:.6g} x", f"(1 +{size:.1e}) x"),
        size=size,
        name=f"generated_{name}".replace("-", "m").replace("+", ""),
    )


def _edit(
    seam: str,
    axis: str,
    coordinate: str,
    rank: int,
    step: int,
    tensor: str,
    size: float,
    *,
    any_rank: bool,
) -> Edit:
    factor = repr(1 + size)
    if seam == "activation":
        file, symbol, old, new = ACTIVATIONS[axis]
        return Edit(file, symbol, old, new.format(factor=factor, rank=rank, step=step))
    mesh = "self.mesh" if seam == "weight" else "self._mesh"
    is_rank = "True" if any_rank else f'{mesh}.coordinates["{coordinate}"] == {rank}'
    loop = (
        "        for name, parameter in {parameters}:\n"
        f'            if ("." + name).endswith(".{tensor}") and __planted__({{step}} >= {step} and {is_rank}):\n'
        "                held = {held}\n"
        f'                getattr(held, "_local_tensor", held).detach().mul_({factor})\n'
    )
    if seam == "weight":
        old = "        optimizer.step()\n"
        new = loop.format(parameters="self.named_parameters()", step="self.step", held="parameter")
        return Edit(MODEL, "ParallelModel.update", old, old + new)
    old = "        self._loads.reduce_counts_over_ranks()\n"
    count = '        count = vars(self)["count"] = vars(self).get("count", 0) + 1\n'
    parameters = "self._parameters.iterate_optimizer_parameters()"
    new = loop.format(parameters=parameters, step="count", held="parameter.grad")
    return Edit(REDUCER, "StepReducer.reduce_and_clip", old, old + count + new)
