"""What the reference computed, on disk: written once by one process, read by every rank of every
layout.

DIRECTORY/trace.json says losses, norms and the size of each tensor; initial, step-K, final and
buffers .safetensors hold the tensors by their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from phalanx.verify.forward_probe import Probe
from phalanx.verify.reference import AloneStep
from phalanx.verify.trace_facts import (
    BUFFERS,
    FINAL,
    GRADIENTS,
    INITIAL,
    TRACE,
    UPDATED,
    Trace,
    TraceStep,
    gradients_of,
)


class TraceReader:
    """The tensors of a trace, by slices; a file is open while its set is asked for."""

    def __init__(self, trace: Trace, kind: str) -> None:
        self._path = trace.directory / f"{kind}.safetensors"

    def __enter__(self) -> TraceReader:
        self._file: Any = safe_open(self._path, framework="pt")  # type: ignore[no-untyped-call]
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def block(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """The elements [offset, offset + size) of a tensor."""
        # A tensor without dimensions has no slices.
        if not size:
            return self._file.get_tensor(name)
        slices = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        return self._file.get_slice(name)[slices]


def write_trace(
    directory: Path,
    dtype: str,
    module: nn.Module,
    probed: Probe,
    steps: Iterable[AloneStep],
    *,
    evaluate: Callable[[nn.Module], float],
    updated: tuple[nn.Module, Iterable[AloneStep]] | None = None,
    other: Callable[[], Path | None] = lambda: None,
) -> None:
    """Run `steps`, which change `module`, and keep all that they show.

    Atomic enough: trace.json is written last.

    `other`: asked after the steps for the directory of the same in float64, or from weights that
    are rounded otherwise, which tells how much of a tensor is rounding.
    """
    # A group that crashed may have begun.
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {INITIAL: _save(directory / INITIAL, dict(module.named_parameters()))}
    trace_steps, lr = [], 0.0
    for number, step in enumerate(steps):
        lr = step.lr
        gradients: dict[str, torch.Tensor] = {}
        for name, gradient in step.gradients.items():
            if gradient is not None:
                gradients[name] = gradient
        for name, parameter in module.named_parameters():
            # Without a part in the loss: zeros, as a layout's are (`gradient_shards`).
            if step.gradients[name] is None:
                gradients[name] = torch.zeros_like(parameter)
        sizes[gradients_of(number)] = _save(directory / gradients_of(number), gradients)
        trace_steps.append(TraceStep(step.loss, step.num_targets, step.grad_norm, step.max_norm))
    sizes[FINAL] = _save(directory / FINAL, dict(module.named_parameters()))
    buffers = _persistent_buffers(module)
    if buffers:
        sizes[BUFFERS] = _save(directory / BUFFERS, buffers)
    evaluation = evaluate(module)
    if updated is not None:
        sizes[UPDATED] = _run_and_save(directory, *updated)
    body = {
        "dtype": dtype,
        "lr": lr,
        "steps": [asdict(step) for step in trace_steps],
        "sizes": sizes,
        **asdict(probed),
    }
    # Not before: it needs what routers chose in the steps and in the evaluation.
    other_directory = other()
    if other_directory is not None:
        kinds = [kind for kind in sizes if kind.startswith(GRADIENTS)]
        body["rounding"] = {kind: _distances(directory, other_directory, kind) for kind in kinds}
    body["evaluation"] = evaluation
    # Last: whoever finds this file finds the others.
    (directory / TRACE).write_text(json.dumps(body))


def _distances(directory: Path, other_directory: Path, kind: str) -> dict[str, float]:
    """The distance ||a - b|| of each tensor of a set from the same in another directory."""
    with safe_open(directory / f"{kind}.safetensors", framework="pt") as tensors:  # type: ignore[no-untyped-call]
        with safe_open(other_directory / f"{kind}.safetensors", framework="pt") as other_tensors:  # type: ignore[no-untyped-call]
            distances = {}
            for name in {*tensors.keys()} & {*other_tensors.keys()}:
                difference = tensors.get_tensor(name).double() - other_tensors.get_tensor(name)
                distances[name] = difference.norm().item()
            return distances


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint keeps: running statistics, counters."""
    saved = set(module.state_dict(keep_vars=True))
    buffers = {}
    for name, buffer in module.named_buffers():
        if name in saved and buffer.numel():
            buffers[name] = buffer
    return buffers


def _run_and_save(
    directory: Path, module: nn.Module, steps: Iterable[AloneStep]
) -> dict[str, float]:
    """Run `steps` to their end and keep the weights; how far each moved."""
    # Copies, for steps change weights in place.
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for _ in steps:
        pass
    _save(directory / UPDATED, dict(module.named_parameters()))
    return {
        name: (p.detach() - before[name]).double().norm().item()
        for name, p in module.named_parameters()
    }


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    # A copy: safetensors refuses memory that is not contiguous, or that two tensors share.
    plain = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_file(plain, path.with_suffix(".safetensors"))
    return {name: tensor.double().norm().item() for name, tensor in plain.items()}
