"""What the reference computed, on disk: written once by one process, read by every rank of every
layout.

DIRECTORY/trace.json says losses, norms and the size of each tensor; initial, begin, and of each
step K step-K (gradients), weights-K and buffers-K .safetensors hold the tensors by their names.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from phalanx.verify.forward_probe import ForwardProbe
from phalanx.verify.number_types import FP8, find_rounding_dtype, is_narrow_dtype
from phalanx.verify.reference import OneProcessStep
from phalanx.verify.trace_facts import (
    BEGIN_KIND,
    BUFFER_KIND_PREFIX,
    GRADIENT_KIND_PREFIX,
    INITIAL_KIND,
    TRACE_FILE_NAME,
    AdapterFacts,
    ArithmeticFault,
    InitialFault,
    Trace,
    TraceStep,
    name_buffers_set,
    name_gradients_set,
    name_weights_set,
    read_trace,
)

# Of what weights that are rounded otherwise change of a gradient: so much may a narrow type lose of
# one, and of the median.
MAX_LOST_DIGITS, MAX_USUAL_LOST_DIGITS = 10.0, 2.0
# A part of a single gradient below which no loss of digits is a mistake: sums may cancel.
MIN_LOST_PART = 0.1
# Of a usual gradient: a smaller one may cancel whatever the weights are.
LEAST_SIZE = 1e-3


class TraceTensorReader:
    """The tensors of a trace, by slices; a file is open while its set is asked for."""

    def __init__(self, trace: Trace, kind: str) -> None:
        self._path = trace.directory / f"{kind}.safetensors"

    def __enter__(self) -> TraceTensorReader:
        self._file: Any = safe_open(self._path, framework="pt")  # type: ignore[no-untyped-call]
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def read_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor, which is not read."""
        return tuple(self._file.get_slice(name).get_shape())

    def block(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """The elements [offset, offset + size) of a tensor."""
        # A tensor without dimensions has no slices.
        if not size:
            return self.read(name)
        slices = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        return self._file.get_slice(name)[slices]


class AppliedTraceGradients:
    """The gradients that are applied in each step, block by block: those of a trace, clipped."""

    def __init__(self, trace: Trace) -> None:
        self._leader = trace if trace.leader is None else read_trace(trace.leader)

    @property
    def lr(self) -> float:
        return self._leader.lr

    @property
    def names(self) -> Collection[str]:
        """The parameters of which there are gradients."""
        return self._leader.sizes[name_gradients_set(0)].keys()

    def open(self, step: int) -> AbstractContextManager[TraceTensorReader]:
        """The gradients of a step, before clipping."""
        return TraceTensorReader(self._leader, name_gradients_set(step))

    def clipping_factor(self, step: int) -> float:
        """The factor by which the gradients of a step are multiplied."""
        facts = self._leader.steps[step]
        if facts.max_norm is None:
            return 1.0
        return facts.max_norm / facts.grad_norm

    def read(self, step: int, name: str) -> torch.Tensor:
        """The whole gradient of a parameter, clipped."""
        with self.open(step) as reader:
            return reader.read(name) * self.clipping_factor(step)


class TraceWriter:
    """Keeps what a reference computes in `directory`, as `train_in_one_process` shows it.

    Atomic enough: trace.json is written last.
    """

    def __init__(
        self,
        directory: Path,
        dtype: str,
        module: nn.Module,
        initial: Mapping[str, torch.Tensor],
        randomized: tuple[str, ...],
        special: Sequence[str],
    ) -> None:
        """`initial`: the parameters before those in `randomized` were made random. `special`: of
        each step, what no usual one has."""
        # A group that crashed may have begun.
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._dtype, self._module = directory, dtype, module
        self._randomized, self._special = randomized, special
        self._steps: list[TraceStep] = []
        self._sizes = {INITIAL_KIND: _save_tensors(directory / INITIAL_KIND, initial)}
        self._compute_norms_by_name: dict[str, dict[str, float]] = {}
        self._lr = 0.0
        self._begin = {name: p.detach().clone() for name, p in module.named_parameters()}
        self._sizes[BEGIN_KIND] = _save_tensors(directory / BEGIN_KIND, self._begin)

    def on_gradients(self, number: int, step: OneProcessStep) -> None:
        gradients = {}
        for name, parameter in self._module.named_parameters():
            gradient = step.gradients[name]
            # Without a part in the loss: zeros, as a layout's are (`collect_gradient_shards`).
            gradients[name] = torch.zeros_like(parameter) if gradient is None else gradient
        kind = name_gradients_set(number)
        self._sizes[kind] = _save_tensors(self._directory / kind, gradients)
        self._steps.append(
            TraceStep(
                step.loss, step.num_targets, step.grad_norm, step.max_norm, self._special[number]
            )
        )
        self._lr = step.lr

    def on_update(self, number: int) -> None:
        kind, parameters = name_weights_set(number), dict(self._module.named_parameters())
        self._compute_norms_by_name[kind] = _save_tensors(self._directory / kind, parameters)
        moved = {name: p.detach() - self._begin[name] for name, p in parameters.items()}
        self._sizes[kind] = {name: t.double().norm().item() for name, t in moved.items()}
        buffers = _list_persistent_buffers(self._module)
        if buffers:
            kind = name_buffers_set(number)
            self._sizes[kind] = _save_tensors(self._directory / kind, buffers)

    @property
    def trace(self) -> Trace:
        """The trace of the steps so far, of what others need that follow it."""
        return Trace(
            self._directory,
            self._dtype,
            self._lr,
            tuple(self._steps),
            tuple(self._begin),
            self._sizes,
            norms=self._compute_norms_by_name,
            randomized=self._randomized,
        )

    def finish(
        self,
        probed: ForwardProbe,
        *,
        evaluation: float,
        num_evaluated: int,
        leader: Path | None,
        loads: Sequence[Mapping[str, Sequence[int]]],
        other_directories: Sequence[Path],
        initial_faults: Sequence[InitialFault] | None,
        arithmetic_faults: Sequence[ArithmeticFault] | None,
        adapter: AdapterFacts | None,
        judges_lost_digits: bool = False,
    ) -> None:
        """Write trace.json. `initial_faults`, `arithmetic_faults`, `adapter`: as `Trace` has them;
        `judges_lost_digits`: with `lossy_gradients`.
        `other_directories`: those of the same in float64, or from weights that are rounded
        otherwise, which tell how much of a tensor is rounding: the most of them counts."""
        rounding: dict[str, dict[str, float]] = {}
        strays: dict[str, float] = {}
        rounding_dtype = find_rounding_dtype(self._dtype, probed.narrows)
        for other in other_directories:
            self._raise_rounding_to_distances(rounding, other, rounding_dtype)
            if rounding_dtype:
                self._raise_scalar_rounding_to(strays, evaluation, read_trace(other))
        lossy = None
        if judges_lost_digits and is_narrow_dtype(self._dtype) and self._dtype != FP8:
            lossy = self._find_lossy_gradients(other_directories)
        body = {
            "dtype": self._dtype,
            "lr": self._lr,
            "steps": [asdict(step) for step in self._steps],
            "sizes": self._sizes,
            "norms": self._compute_norms_by_name,
            "leader": None if leader is None else str(leader),
            "randomized": self._randomized,
            "loads": loads,
            "rounding": rounding,
            "strays": strays,
            "evaluation": evaluation,
            "num_evaluated": num_evaluated,
            "initial_faults": _to_json(initial_faults),
            "arithmetic_faults": _to_json(arithmetic_faults),
            "lossy_gradients": _to_json(lossy),
            "adapter": None if adapter is None else asdict(adapter),
            **asdict(probed),
        }
        # Last: whoever finds this file finds the others.
        (self._directory / TRACE_FILE_NAME).write_text(json.dumps(body))

    def _raise_rounding_to_distances(
        self, rounding: dict[str, dict[str, float]], other: Path, rounding_dtype: str
    ) -> None:
        """Make each distance in `rounding` at least that to `other`. `rounding_dtype`: as `Trace`
        has it."""
        # One that is nudged has lost as much again; a wide one has lost nothing.
        share = 1
        # Those of fp8 have other scales: all of it is rounded anew, and what cancels shows, too.
        is_rounded_anew = self._dtype == FP8
        if rounding_dtype and not read_trace(other).rounding_dtype:
            share = 1 if is_rounded_anew else 2
        if rounding_dtype:
            judged: tuple[str, ...] = (GRADIENT_KIND_PREFIX, BUFFER_KIND_PREFIX)
        else:
            judged = (GRADIENT_KIND_PREFIX,)
        for kind in self._sizes:
            if not kind.startswith(judged):
                continue
            largest = rounding.setdefault(kind, {})
            for name, distance in _measure_tensor_distances(self._directory, other, kind).items():
                largest[name] = max(share * distance, largest.get(name, 0.0))

    def _find_lossy_gradients(
        self, other_directories: Sequence[Path]
    ) -> tuple[ArithmeticFault, ...] | None:
        """The gradients that are so far from the same in a wide type that rounding does not explain
        it, the worst first; None where one of both is missing."""
        nudged = [other for other in other_directories if read_trace(other).rounding_dtype]
        wide = [other for other in other_directories if other not in nudged]
        if not nudged or not wide:
            return None
        sizes = self._add_up_squares(None)
        lost = self._add_up_squares(wide[0])
        changed: dict[str, float] = {}
        for other in nudged:
            for name, square in self._add_up_squares(other).items():
                changed[name] = changed.get(name, 0.0) + square / len(nudged)
        usual = math.sqrt(sum(sizes.values()) / len(sizes))
        names = [name for name, size in sizes.items() if math.sqrt(size) > LEAST_SIZE * usual]
        return find_lossy_gradients(
            {name: math.sqrt(lost[name] / sizes[name]) for name in names},
            {name: math.sqrt(changed[name] / sizes[name]) for name in names},
        )

    def _add_up_squares(self, other: Path | None) -> dict[str, float]:
        """The squares of each gradient's distance from that in `other`, or of its norm, added up
        over all steps."""
        squares: dict[str, float] = {}
        for kind in filter(lambda kind: kind.startswith(GRADIENT_KIND_PREFIX), self._sizes):
            numbers = self._sizes[kind]
            if other is not None:
                numbers = _measure_tensor_distances(self._directory, other, kind)
            for name, number in numbers.items():
                squares[name] = squares.get(name, 0.0) + number**2
        return squares

    def _raise_scalar_rounding_to(
        self, strays: dict[str, float], evaluation: float, other: Trace
    ) -> None:
        """Make each number in `strays` at least how far the same of `other` is from it."""
        pairs = [("evaluation", evaluation, other.evaluation or evaluation)]
        for step, nudged in zip(self._steps, other.steps, strict=True):
            pairs.append(("loss", step.loss, nudged.loss))
            pairs.append(("grad_norm", step.grad_norm, nudged.grad_norm))
        for attribute, value, nudged_value in pairs:
            stray = abs(value - nudged_value) / max(abs(value), 1e-30)
            strays[attribute] = max(stray, strays.get(attribute, 0.0))


def find_lossy_gradients(
    lost: Mapping[str, float], changed: Mapping[str, float]
) -> tuple[ArithmeticFault, ...]:
    """The gradients that a narrow type gets wrong, the worst first: `lost` says how far each is
    from the same in a wide type, `changed` how far from that of weights that are rounded otherwise,
    both relative.

    A computation that is right but for its digits loses half of what such weights change (measured:
    0.5 to 0.6 of it in the median, 9 times it for a bias of a norm, whose parts cancel).
    """
    if not lost:
        return ()
    usual = statistics.median(changed.values())
    ratios = {name: lost[name] / max(changed[name], usual, 1e-30) for name in lost}
    most, least = MAX_LOST_DIGITS, MIN_LOST_PART
    if not statistics.median(ratios.values()) <= MAX_USUAL_LOST_DIGITS:
        most, least = MAX_USUAL_LOST_DIGITS, 0.0
    faults = []
    for name in sorted(ratios, key=lambda name: -ratios[name]):
        # Not `>`: NaN is above any.
        if not ratios[name] <= most and not lost[name] <= least:
            faults.append(ArithmeticFault(name, lost[name]))
    return tuple(faults)


def _to_json(
    faults: Sequence[InitialFault | ArithmeticFault] | None,
) -> list[dict[str, Any]] | None:
    if faults is None:
        return None
    return [asdict(fault) for fault in faults]


def _measure_tensor_distances(
    directory: Path, other_directory: Path, kind: str
) -> dict[str, float]:
    """The distance ||a - b|| of each tensor of a set from the same in another directory."""
    with safe_open(directory / f"{kind}.safetensors", framework="pt") as tensors:  # type: ignore[no-untyped-call]
        with safe_open(other_directory / f"{kind}.safetensors", framework="pt") as other_tensors:  # type: ignore[no-untyped-call]
            distances = {}
            for name in {*tensors.keys()} & {*other_tensors.keys()}:
                difference = tensors.get_tensor(name).double() - other_tensors.get_tensor(name)
                distances[name] = difference.norm().item()
            return distances


def _list_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint keeps: running statistics, counters."""
    saved = set(module.state_dict(keep_vars=True))
    buffers = {}
    for name, buffer in module.named_buffers():
        if name in saved and buffer.numel():
            buffers[name] = buffer
    return buffers


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    # A copy: safetensors refuses memory that is not contiguous, or that two tensors share.
    plain = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_file(plain, path.with_suffix(".safetensors"))
    return {name: tensor.double().norm().item() for name, tensor in plain.items()}
