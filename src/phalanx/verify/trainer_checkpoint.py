"""Reads the newest checkpoint of a judged run whole, as exports do, beside the second loop; and
tries to save what no checkpoint may hold."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from phalanx.checkpoint.exchange.checkpoint_reader import CheckpointReader
from phalanx.checkpoint.manifest import OPTIMIZER_TENSOR_PREFIX, read_manifest
from phalanx.checkpoint.reading.choose import find_newest_or_best_checkpoint
from phalanx.checkpoint.reading.full_tensors import Bits, FullTensorReader
from phalanx.core.errors import CheckpointError
from phalanx.mesh.logical import Box, LogicalShard, full_name, get_local_tensor
from phalanx.train.state import TrainState
from phalanx.verify.trainer_facts import BUFFER, STATE, WEIGHT, Dots, ReadCheckpoint
from phalanx.verify.trainer_observer import compute_shard_dots
from phalanx.verify.trainer_reference import SecondLoopReader

# Of a tensor with so many dimensions exports read elements of the first one, as an expert's matrix.
NUM_STACK_DIMS = 3


def read_newest_checkpoint(location: Path, reader: SecondLoopReader) -> ReadCheckpoint:
    """Read the newest checkpoint of the run at `location`: weights and buffers as exports read
    them, and the optimizer's state besides."""
    read = ReadCheckpoint()
    try:
        folder = find_newest_or_best_checkpoint(location)
        read.step = folder.step
        with CheckpointReader(folder) as weights:
            _compare_weights(weights, reader, read)
        with FullTensorReader(folder, read_manifest(folder)) as tensors:
            _compare_optimizer_state(tensors, reader, read)
    except CheckpointError as error:
        read.error = str(error)
    return read


@torch.no_grad()
def try_to_save_infinite_weight(state: TrainState) -> str:
    """Take a snapshot of the state while an element of a trained weight is infinite, which no
    checkpoint may hold: the weight's name if there is one, and "" if it is refused.

    The element is what it was afterwards. A rank without a part of any weight has nothing to try.
    """
    found = _find_finite_weight(state)
    if found is None:
        return ""
    name, tensor = found
    element = tensor[(0,) * tensor.ndim]
    before = element.clone()
    element.fill_(math.inf)
    try:
        state.snapshot()
    except CheckpointError:
        return ""
    finally:
        element.copy_(before)
    return name


def _find_finite_weight(state: TrainState) -> tuple[str, torch.Tensor] | None:
    """The first trained weight of which this rank has a part, and that part; others may have been
    infinite from the beginning."""
    for raw_name, parameter in state.model.named_parameters():
        tensor = get_local_tensor(parameter.detach())
        if parameter.requires_grad and tensor.numel() and bool(tensor.isfinite().all()):
            return full_name(raw_name), tensor
    return None


def _compare_weights(
    weights: CheckpointReader, reader: SecondLoopReader, read: ReadCheckpoint
) -> None:
    for name in weights.tensors:
        kind = WEIGHT if reader.has(read.step, f"{WEIGHT}/{name}") else BUFFER
        if reader.has(read.step, f"{kind}/{name}"):
            dots = _compute_tensor_dots(weights, reader, name, f"{kind}/{name}", read)
            read.tensors.setdefault(kind, {})[name] = dots
    sizes = reader.recording_phase.get_step_record(read.step).sizes
    known = {*weights.tensors, *weights.manifest.aliases}
    names = [*sizes.get(WEIGHT, {}), *sizes.get(BUFFER, {})]
    read.missing = tuple(name for name in names if name not in known)


def _compare_optimizer_state(
    tensors: FullTensorReader, reader: SecondLoopReader, read: ReadCheckpoint
) -> None:
    for stored in tensors.manifest.tensors:
        if not stored.startswith(OPTIMIZER_TENSOR_PREFIX):
            continue
        name, _, slot = stored.removeprefix(OPTIMIZER_TENSOR_PREFIX).rpartition("/")
        kind = f"{STATE}/{slot}"
        if reader.has(read.step, f"{kind}/{name}"):
            dots = _compute_tensor_dots(tensors, reader, stored, f"{kind}/{name}", read)
            read.tensors.setdefault(kind, {})[name] = dots


def _compute_tensor_dots(
    tensors: FullTensorReader, reader: SecondLoopReader, stored: str, key: str, read: ReadCheckpoint
) -> Dots:
    """The Dots of a tensor, added up over the ways in which it is read: whole, and a stack element
    by element; notes in `read` where these are not the same."""
    info = tensors.manifest.tensors[stored]
    readings = [tensors.load(stored)]
    if len(info.shape) >= NUM_STACK_DIMS:
        elements = [tensors.load_element(stored, number) for number in range(info.shape[0])]
        readings.append(np.stack(elements))
        if not np.array_equal(readings[0], readings[1]):
            read.unequal = (*read.unequal, stored)
    sums = [0.0] * 4
    for bits in readings:
        shard = _wrap_whole_tensor(stored, bits, info.dtype)
        dots = compute_shard_dots(reader, shard, key, read.step)
        sums = [total + part for total, part in zip(sums, dots, strict=True)]
    first, second, third, fourth = sums
    return first, second, third, fourth


def _wrap_whole_tensor(name: str, bits: Bits, dtype: str) -> LogicalShard:
    data = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1).view(np.uint8))
    tensor = data.view(getattr(torch, dtype)).reshape(bits.shape)
    origin = (0,) * bits.ndim
    return LogicalShard(name, bits.shape, dtype, (Box(origin, origin, bits.shape),), tensor)
