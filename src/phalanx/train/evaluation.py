"""Evaluations between steps: which are done, which was the best, and the state that training must find unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from phalanx.core.digest import stable_hash64
from phalanx.mesh.mesh import Mesh
from phalanx.observe.events import EvalFinished
from phalanx.observe.tail import recorded
from phalanx.parallel.model import Batch, ParallelModel

# What is evaluated: batches by source ("" where there is only one). Iterated once per evaluation; every rank must yield
# equally many batches of each.
HeldOut = Mapping[str, Iterable[Batch]]


@dataclass(frozen=True)
class Evaluation:
    """Loss per target over all ranks and sources."""

    step: int
    loss: float
    num_targets: int
    loss_by_source: Mapping[str, float]


class EvalRecord:
    """The evaluations of a run so far, the same on every rank."""

    def __init__(self, done: Iterable[tuple[int, float, int]] = ()) -> None:
        self._done = {step: (loss, num_targets) for step, loss, num_targets in done}

    def has(self, step: int) -> bool:
        return step in self._done

    def add(self, step: int, loss: float, num_targets: int) -> None:
        self._done[step] = (loss, num_targets)

    def best(self, num_targets: int) -> tuple[int, float]:
        """(step, loss) of the lowest loss, the first of equals; (0, NaN) if there is none.

        Only evaluations of `num_targets` targets: a loss over other data cannot be compared.
        """
        finite = [
            (loss, step) for step, (loss, number) in self._done.items() if number == num_targets and math.isfinite(loss)
        ]
        loss, step = min(finite, default=(math.nan, 0))
        return step, loss


def read_record(run_dir: Path | None, step: int, mesh: Mesh) -> EvalRecord:
    """What rank 0's event files say of evaluations up to `step`, for all ranks. Those of later steps are done again."""
    done: list[tuple[int, float, int]] = []
    if run_dir is not None and step > 0 and mesh.rank == 0:
        found = (envelope.event for envelope in recorded(run_dir, EvalFinished))
        done = [(int(e.step), e.loss, int(e.num_targets)) for e in found if e.step <= step and not math.isnan(e.loss)]
    return EvalRecord((int(s), float(loss), int(n)) for s, loss, n in mesh.gather_json(done)[0])


@contextmanager
def undisturbed(model: ParallelModel, mesh: Mesh, seed: int) -> Iterator[None]:
    """Inside, modules are in evaluation mode, their buffers (running statistics) are rank 0's, and what they draw is
    the same each time. Training notices nothing.

    A module that its owner put into evaluation mode (a frozen BatchNorm, say) is in it afterwards, too.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for module in model.module.modules()]
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(stable_hash64("evaluate", seed, mesh.data_parallel_rank) % 2**63)
        model.train(False)
        try:
            if mesh.device_mesh is not None:
                for buffer, _ in buffers:
                    dist.broadcast(buffer, 0)
            yield
        finally:
            model.train(True)
            for module, is_training in modes:
                module.training = is_training
            for buffer, before in buffers:
                buffer.copy_(before)
