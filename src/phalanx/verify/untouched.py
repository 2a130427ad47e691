"""The job's module as nobody has changed it, and what a forward of it shows: an order, draws, digits, mixed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.mesh.logical import module_shards
from phalanx.nn.build import build_model
from phalanx.nn.hf_experts import use_batched_products
from phalanx.plan.plan import Plan
from phalanx.verify.masks import Definition
from phalanx.verify.reference import Batch, LossSum, forward_order

NARROW = (torch.float32, torch.bfloat16, torch.float16)
MIXES = 1e-4  # far above the rounding of a sum, far below what statistics of a batch do to a loss


@dataclass(frozen=True)
class Probe:
    """`order`: parameters as a forward meets them. `narrows`: in float64 it rounds to a narrower type on its way.

    `mixes_rows`: the loss of a batch is not the sum of the losses of its parts, as with BatchNorm. `dropped`: modules
    that drop something.
    """

    order: tuple[str, ...]
    narrows: bool
    mixes_rows: bool
    dropped: tuple[str, ...] = ()


def build_untouched(job: Job, plan: Plan, dtype: str, *, materialize: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """The job's module in `dtype`, in training mode, without dropout that each rank draws; and what was done to it."""
    module = build_model(job, plan.model_shape).to(getattr(torch, dtype))
    done: tuple[str, ...] = ()
    if dtype == "float64" and use_batched_products(module):
        done = ("experts are computed by batched products: torch's grouped one has no float64",)
    num_dropped = switch_off_dropout(module) if plan.dropout == "local" else 0
    if materialize and any(p.is_meta for p in module.parameters()):
        module.to_empty(device="cpu")
        shards, _ = module_shards(module)
        with torch.no_grad():
            module.initialize(shards, job.run.seed)  # type: ignore[operator]
    if num_dropped:
        layers = f"{num_dropped} dropout layers are" if num_dropped > 1 else "1 dropout layer is"
        done += (f"{layers} switched off: with parallel.dropout=local what they draw depends on the layout",)
    return module, done


def switch_off_dropout(module: nn.Module) -> int:
    """Dropout layers, and torch's attention and recurrent layers, which hold a probability themselves. How many."""
    num_dropped = 0
    for part in module.modules():
        name = "p" if isinstance(part, nn.modules.dropout._DropoutNd) else "dropout"
        probability = getattr(part, name, 0.0)
        if isinstance(probability, float) and probability > 0:
            setattr(part, name, 0.0)
            num_dropped += 1
    return num_dropped


def probe(build: Callable[[], nn.Module], loss_sum: LossSum, batch: Batch, seed: int) -> Probe:
    """Look at one forward of modules of their own: it may move buffers, and the reference must not have seen it.

    Raises LayoutError for a forward that draws random numbers: what it computes is not a function of the batch.
    """
    module, losses = build(), []
    narrowing, masks = _Narrowing(), Definition(module, seed)
    rows = len(next(iter(batch.values())))
    with _refusing_draws(module), masks.of(1, 0, rows), narrowing:
        order = forward_order(module, lambda: losses.append(loss_sum(module, batch)[0].item()))
    mixes = rows > 1 and _mixes_rows(build(), loss_sum, batch, seed, losses[0])
    return Probe(tuple(order), narrowing.found, mixes, tuple(masks.dropped))


@torch.no_grad()
def _mixes_rows(module: nn.Module, loss_sum: LossSum, batch: Batch, seed: int, loss: float) -> bool:
    """Whether the loss of the two halves of a batch is another than `loss`, that of the whole."""
    rows, apart, masks = len(next(iter(batch.values()))), 0.0, Definition(module, seed)
    for start, stop in ((0, rows // 2), (rows // 2, rows)):
        with masks.of(1, start, stop - start):
            apart += loss_sum(module, {key: t[start:stop] for key, t in batch.items()})[0].item()
    return abs(apart - loss) > MIXES * abs(loss)


class _Narrowing(TorchDispatchMode):
    """Sees whether a float64 tensor becomes one of fewer digits."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype in NARROW:
            self.found |= any(isinstance(arg, torch.Tensor) and arg.dtype is torch.float64 for arg in args)
        return out


@dataclass
class _Draws:
    """The generator's state where each call of a module began; the first that changed it is the innermost."""

    name: str = ""
    states: list[torch.Tensor] = field(default_factory=list)

    def enter(self, *_: object) -> None:
        self.states.append(torch.get_rng_state())

    def leave(self, name: str) -> None:
        if not torch.equal(self.states.pop(), torch.get_rng_state()):
            self.name = self.name or name


@contextmanager
def _refusing_draws(module: nn.Module) -> Iterator[None]:
    draws, hooks = _Draws(), []
    for path, part in module.named_modules():
        name = f"{path} ({type(part).__name__})" if path else type(part).__name__
        hooks.append(part.register_forward_pre_hook(draws.enter))
        hooks.append(part.register_forward_hook(lambda *_, name=name: draws.leave(name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if draws.name:
        raise LayoutError(
            f"the forward of {draws.name} draws random numbers",
            why="each rank draws its own, so no layout computes what one process computes",
            fix="switch that off with model.args to have the rest judged",
        )


def described_failure(error: Exception, dtype: str) -> str:
    """Why there is no reference: nothing that a layout could be blamed for."""
    if isinstance(error, LayoutError):
        return str(error)
    kind = "" if isinstance(error, ArithmeticError) else f"{type(error).__name__}: "  # those are the reference's own
    return f"the module alone, in one process in {dtype}: {kind}{_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["it says nothing"])[0]


def taken(names: Mapping[str, Any], batch: Batch) -> dict[str, torch.Tensor]:
    """The entries of a batch, besides inputs and targets, that a forward has arguments for."""
    return {key: t for key, t in batch.items() if key not in ("inputs", "targets") and key in names}
