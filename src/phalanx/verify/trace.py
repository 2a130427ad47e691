"""What the reference computed, on disk: written once by one process, read by every rank of every layout.

DIRECTORY/trace.json says losses, norms and the size of each tensor; initial, step-K and final .safetensors hold the
tensors by their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from phalanx.verify.reference import AloneStep
from phalanx.verify.trace_facts import FINAL, INITIAL, TRACE, UPDATED, Trace, TraceStep, gradients_of


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
        if not size:
            return self._file.get_tensor(name)
        places = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        return self._file.get_slice(name)[places]


def write_trace(
    directory: Path,
    dtype: str,
    module: nn.Module,
    order: Iterable[str],
    steps: Iterable[AloneStep],
    *,
    updated: tuple[nn.Module, Iterable[AloneStep]] | None = None,
) -> None:
    """Run `steps`, which change `module`, and keep all that they show. Atomic enough: trace.json is written last."""
    directory.mkdir(parents=True)
    sizes = {INITIAL: _save(directory / INITIAL, dict(module.named_parameters()))}
    kept, lr = [], 0.0
    for number, step in enumerate(steps):
        lr = step.lr
        zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters() if step.gradients[name] is None}
        found = {name: gradient for name, gradient in step.gradients.items() if gradient is not None} | zeros
        sizes[gradients_of(number)] = _save(directory / gradients_of(number), found)
        kept.append(TraceStep(step.loss, step.num_targets, step.grad_norm, step.max_norm))
    sizes[FINAL] = _save(directory / FINAL, dict(module.named_parameters()))
    if updated is not None:
        sizes[UPDATED] = _run_and_save(directory, *updated)
    body = {"dtype": dtype, "lr": lr, "steps": [asdict(step) for step in kept], "order": list(order), "sizes": sizes}
    (directory / TRACE).write_text(json.dumps(body))


def _run_and_save(directory: Path, module: nn.Module, steps: Iterable[AloneStep]) -> dict[str, float]:
    """Run `steps` to their end and keep the weights; how far each moved."""
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for _ in steps:
        pass
    _save(directory / UPDATED, dict(module.named_parameters()))
    return {name: (p.detach() - before[name]).double().norm().item() for name, p in module.named_parameters()}


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(plain, path.with_suffix(".safetensors"))
    return {name: tensor.double().norm().item() for name, tensor in plain.items()}
