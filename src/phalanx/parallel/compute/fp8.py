"""fp8: the matrix products of blocks, forward and backward, through torchao's Float8Linear.

Each product casts what goes in to fp8 with one scale per tensor, from its largest element at that
moment (dynamic scaling, torchao's "tensorwise"); weights, activations between products and what
autograd keeps stay as they are in bf16. Embedding, head and norms are left alone, and so are widths
that the kernels do not take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.core.errors import EnvironmentProblem, LayoutError
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan
from phalanx.plan.precision import FP8_FIX, FP8_WIDTH_MULTIPLE, MIN_FP8_CAPABILITY


class Float8LinearLayers:
    order = TransformOrder.FP8

    emulate = False
    """Compute as a GPU with fp8 would, in fp32, on any device: for tests."""

    def is_needed(self, plan: Plan) -> bool:
        return plan.precision == "fp8"

    def apply(self, context: ParallelContext) -> None:
        if context.plan.layout.tp > 1 or context.plan.layout.pp > 1:
            raise LayoutError("precision.compute=fp8 is for layouts without tp and pp", fix=FP8_FIX)
        if not self.emulate:
            require_fp8_device(context.mesh.device)
        name = type(context.root.module).__name__
        if not sum(
            convert_linear_layers_to_fp8(block, emulate=self.emulate) for block in context.blocks
        ):
            raise LayoutError(
                f"precision.compute=fp8 finds nothing to do in {name}",
                why=f"no block has an nn.Linear whose widths are multiples of {FP8_WIDTH_MULTIPLE}",
                fix=FP8_FIX,
            )


def require_fp8_device(device: torch.device) -> None:
    """Raises LayoutError for what is no GPU, and EnvironmentProblem (exit 6) for a GPU that
    cannot multiply fp8."""
    if device.type != "cuda":
        raise LayoutError(
            f"precision.compute=fp8 needs a GPU, and this rank is on {device.type}", fix=FP8_FIX
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise EnvironmentProblem(
            "precision.compute=fp8 needs a GPU of compute capability"
            f" {_format_compute_capability(MIN_FP8_CAPABILITY)}, and"
            f" {name} has {_format_compute_capability(capability)}",
            fix=FP8_FIX,
        )


def _format_compute_capability(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


def convert_linear_layers_to_fp8(block: nn.Module, *, emulate: bool = False) -> int:
    """Puts Float8Linear in the place of the linear layers of `block`, with their own parameters;
    how many.

    Raises EnvironmentProblem (exit 6) where torchao is not installed.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise EnvironmentProblem(
            "precision.compute=fp8 needs torchao",
            why=str(error),
            fix="pip install 'phalanx[gpu]', or " + FP8_FIX,
        ) from None
    # torchao converts every linear layer that its filter lets through: ours takes those whose
    # widths the kernels take.
    suited = [part for part in block.modules() if has_widths_for_fp8(part)]
    config: Any = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(
        block, module_filter_fn=lambda part, name: part in suited, config=config
    )
    return len(suited)


def has_widths_for_fp8(part: nn.Module) -> bool:
    """An nn.Linear, and no subclass, which may multiply in its own way, with widths that kernels
    take."""
    return type(part) is nn.Linear and not (
        part.in_features % FP8_WIDTH_MULTIPLE or part.out_features % FP8_WIDTH_MULTIPLE
    )


parallelism = Float8LinearLayers()
