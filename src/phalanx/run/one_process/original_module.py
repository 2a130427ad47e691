"""The job's module as nobody has changed it: no layout, no wrappers, and a chosen type."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.job.schema import Job
from phalanx.mesh.logical import collect_module_shards
from phalanx.nn.build import build_model
from phalanx.nn.hugging_face.experts import use_batched_expert_products
from phalanx.plan.plan import Plan


def build_original_module(
    job: Job, plan: Plan, dtype: str, *, materialize: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    """The job's module in `dtype`, in training mode, without dropout that each rank draws; and
    what was done to it.

    With `materialize` its weights are there, as one process makes them; without, parameters may be
    on the meta device, as in training, for `parallelize` to fill.
    """
    built = build_model(job, plan.model_shape, is_recorded=not materialize)
    module = _cast_floating_point(built, getattr(torch, dtype))
    done: tuple[str, ...] = ()
    if dtype == "float64" and use_batched_expert_products(module):
        done = ("experts are computed by batched products: torch's grouped one has no float64",)
    num_dropped = set_dropout_to_zero(module) if plan.parallel.dropout == "local" else 0
    if materialize and any(p.is_meta for p in module.parameters()):
        # A module on meta has shapes alone: memory first, then the job's own initialization.
        module.to_empty(device="cpu")
        shards, _ = collect_module_shards(module)
        with torch.no_grad():
            module.initialize(shards, job.run.seed)  # type: ignore[operator]
    if num_dropped:
        layers = f"{num_dropped} dropout layers are" if num_dropped > 1 else "1 dropout layer is"
        done += (
            (
                f"{layers} switched off: with parallel.dropout=local what they draw depends on the"
                " layout"
            ),
        )
    return module, done


def _cast_floating_point(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`module.to(dtype)`, which would take the imaginary part of complex numbers away."""
    wide = dtype.to_complex()

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(wide)
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    return module._apply(cast)


def set_dropout_to_zero(module: nn.Module) -> int:
    """Dropout layers, and torch's attention and recurrent layers, which hold a probability
    themselves.

    How many.
    """
    num_dropped = 0
    for part in module.modules():
        name = "p" if isinstance(part, nn.modules.dropout._DropoutNd) else "dropout"
        probability = getattr(part, name, 0.0)
        if isinstance(probability, float) and probability > 0:
            setattr(part, name, 0.0)
            num_dropped += 1
    return num_dropped
